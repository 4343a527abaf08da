"""The table of an experience: one row per sample, equal on all trainers, from which everything equal is computed.

Advantages, denominators and the packing plan are pure functions of it; the tokens stay with the leader that sampled
them until the plan says who trains them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.config.layout import Layout
from megarl.config.schema import BatchConfig
from megarl.data.packing import PackingPlan, plan_packs
from megarl.errors import UserMistake


@dataclass(frozen=True)
class SampleTable:
    """Rows in order of (position, n, part), whoever sampled them.

    Attributes:
        position, n, part: int64 [N], identity of each sample.
        prompt_tokens, response_tokens: int64 [N].
        trained_tokens: int64 [N], response tokens that are trained on: all but an environment's.
        reward: float64 [N].
        truncated: bool [N], cut by the length limit.
        owner: int64 [N], the dp coordinate of the leader that holds it.
        row: int64 [N], its number among that leader's samples.
    """

    position: np.ndarray
    n: np.ndarray
    part: np.ndarray
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    trained_tokens: np.ndarray
    reward: np.ndarray
    truncated: np.ndarray
    owner: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.position)

    @property
    def lengths(self) -> np.ndarray:
        """Prompt plus response tokens, int64 [N]."""
        return self.prompt_tokens + self.response_tokens

    @property
    def group(self) -> np.ndarray:
        """Number of each sample's group within this experience, int64 [N], ascending from 0."""
        return np.unique(self.position, return_inverse=True)[1]

    @property
    def episode(self) -> np.ndarray:
        """Number of each sample's (position, n) within this experience, int64 [N], ascending from 0.

        The samples of an episode, its parts, share it and have one reward.
        """
        new = np.ones(len(self), bool)
        new[1:] = (np.diff(self.position) != 0) | (np.diff(self.n) != 0)
        return np.cumsum(new) - 1


def cut_minibatches(table: SampleTable, count: int, trained: np.ndarray, seed: int) -> list[np.ndarray]:
    """Deal the experience's groups into optimizer steps: a seeded shuffle of whole groups, then equal parts.

    Groups stay together, so each optimizer step sees every sample an advantage was computed from.

    Args:
        table: the experience.
        count: minibatches; parts differ by at most one group.
        trained: bool [N], samples that are not are left out.
        seed: of the shuffle; the same on all ranks.

    Returns:
        Numbers into the table of each minibatch, ascending. A minibatch is empty if none of its samples is trained on.
    """
    order = np.random.default_rng(seed).permutation(table.group.max(initial=-1) + 1)
    parts = np.array_split(order, count)
    return [np.flatnonzero(np.isin(table.group, part) & trained) for part in parts]


def plan_minibatch(table: SampleTable, members: np.ndarray, layout: Layout, batch: BatchConfig,
                   slots_multiple: int = 1) -> PackingPlan:
    """Which data-parallel rank and micro-batch trains which of `members`; bins hold numbers into `members`.

    Raises:
        UserMistake: a sequence is longer than batch.max_tokens and batch.on_long_sequence is error.
    """
    lengths = table.lengths[members]
    if batch.on_long_sequence == "error" and len(lengths) and lengths.max() > batch.max_tokens:
        worst = members[int(lengths.argmax())]
        raise UserMistake(f"sample {table.n[worst]} of prompt {table.position[worst]} has {lengths.max()} tokens",
                          f"batch.max_tokens ({batch.max_tokens})",
                          "raise it, lower rollout.max_response_tokens, or set batch.on_long_sequence: own")
    return plan_packs(lengths, ranks=layout.data, max_tokens=batch.max_tokens,
                      sequence_multiple=layout.sequence_multiple, pack_multiple=layout.pack_multiple,
                      slots_multiple=slots_multiple, on_long=batch.on_long_sequence)
