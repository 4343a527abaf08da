"""Credit by turns: the return of each turn of an episode, and its advantage within the group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.objective.advantages import group_advantages

if TYPE_CHECKING:
    from megarl.config.schema import ObjectiveConfig
    from megarl.objective.recipes import Objective


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """What each turn and those after it earn: G_k = r_k + discount * G_(k+1)."""
    found, after = [], 0.0
    for reward in reversed(rewards):
        after = reward + discount * after
        found.append(after)
    return found[::-1]


def turn_advantages(rewards: Sequence[Sequence[float]], discount: float, objective: Objective | ObjectiveConfig
                    ) -> list[list[float]]:
    """Advantages of every turn of the episodes of one group.

    Turn k of an episode is compared with turn k of the group's other episodes: A_ik = (G_ik - mean_k) / (std_k + eps),
    mean and standard deviation over the episodes that have a turn k (without the division where normalize_std is off).
    So each episode counts once in a mean, however long it is; the mean depends on nothing that turn k decides; and with
    one reward at the end, discount 1 and episodes of equal length it is GRPO's advantage. A turn that no other episode
    reaches has advantage 0.

    Args:
        rewards: of each episode's turns.
        discount: weight of the next turn's return.
        objective: normalize_std, std_ddof, std_eps.
    """
    values = [returns(episode, discount) for episode in rewards]
    flat_m = torch.tensor([value for episode in values for value in episode], dtype=torch.float64)
    turn_m = torch.tensor([number for episode in values for number in range(len(episode))], dtype=torch.int64)
    advantages = iter(group_advantages(flat_m, turn_m, objective).tolist())
    return [[next(advantages) for _ in episode] for episode in values]
