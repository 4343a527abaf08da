"""From rewards to advantages and token weights. Functions of the whole step's samples, the same on every rank."""

from __future__ import annotations

import torch

from megarl.data.sample import Group
from megarl.objective.recipes import Objective


def group_advantages(rewards_n: torch.Tensor, group_n: torch.Tensor, objective: Objective) -> torch.Tensor:
    """(reward - mean of its group) / (std of its group + eps), or without the division (objective.normalize_std).

    A group whose rewards are all equal, or with one sample, has advantage 0.

    Args:
        rewards_n: floating point [N].
        group_n: int64 [N], numbers from 0.
        objective: normalize_std, std_ddof and std_eps are used (DeepSeekMath, section 4.1.2).

    Returns:
        [N], of the rewards' dtype.
    """
    groups = int(group_n.max()) + 1 if len(group_n) else 0
    count_g = torch.bincount(group_n, minlength=groups).to(rewards_n.dtype)
    mean_g = rewards_n.new_zeros(groups).index_add(0, group_n, rewards_n) / count_g.clamp(min=1)
    centred_n = rewards_n - mean_g[group_n]
    # a mean of equal rewards need not equal them to the last bit; dividing that residue by eps would make a signal
    low_g = rewards_n.new_full((groups,), torch.inf).scatter_reduce(0, group_n, rewards_n, "amin")
    high_g = rewards_n.new_full((groups,), -torch.inf).scatter_reduce(0, group_n, rewards_n, "amax")
    centred_n = torch.where((low_g == high_g)[group_n], torch.zeros_like(centred_n), centred_n)
    if not objective.normalize_std:
        return centred_n
    squares_g = rewards_n.new_zeros(groups).index_add(0, group_n, centred_n.square())
    std_g = (squares_g / (count_g - objective.std_ddof).clamp(min=1)).sqrt() + objective.std_eps
    return centred_n / torch.where(std_g == 0, torch.ones_like(std_g), std_g)[group_n]


def has_signal(group: Group) -> bool:
    """Whether a scored group can teach anything: two of its rewards differ (DAPO, eq. 11)."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) > 1


def overlong_punishment(lengths_n: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Soft overlong punishment, to be added to rewards (DAPO, eq. 13).

    0 up to max_response_tokens - overlong_buffer, then falling linearly to -overlong_penalty at max_response_tokens.

    Args:
        lengths_n: response tokens, [N].
    Returns:
        float64 [N]; zeros where the buffer is 0.
    """
    excess = lengths_n.double() - (objective.max_response_tokens - objective.overlong_buffer)
    if not objective.overlong_buffer:
        return torch.zeros_like(excess)
    return -objective.overlong_penalty * (excess / objective.overlong_buffer).clamp(0, 1)


def token_weights(lengths_n: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The weight of each token of each sample, such that the step's loss is the sum of weight * token loss.

    The divisors are global: counted over all samples of the optimizer step that are trained on, on all ranks, before
    the first forward. A sample left out beforehand (overlong filter, failed reward) counts in no divisor; a token that
    importance sampling masks later keeps its place in it.

    Args:
        lengths_n: response tokens of each trained sample of the step, [N], all above 0.
        objective: the aggregation.
    Returns:
        float64 [N].
    """
    lengths = lengths_n.double()
    if objective.aggregation == "sequence_mean":
        return 1 / (lengths * len(lengths))
    if objective.aggregation == "token_mean":
        return torch.ones_like(lengths) / lengths.sum()
    return torch.ones_like(lengths) / (len(lengths) * objective.max_response_tokens)
