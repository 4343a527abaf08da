"""The parallel degrees of the trainers: the one place that says which combinations are possible.

Pure: no torch. Used by the config check (before a job is queued) and by `cluster.groups` (when it starts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.errors import UserMistake

if TYPE_CHECKING:
    from megarl.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """Degrees of one trainer partition. `world` = tensor * pipeline * context * data.

    Expert parallelism is laid inside tensor x context x data of one pipeline stage, as in Megatron-core:
    tensor * context * data = expert_tensor * expert * expert_data.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("world", "tensor", "pipeline", "context", "expert", "expert_tensor"):
            if getattr(self, name) < 1:
                raise UserMistake(f"{getattr(self, name)} is not a degree", f"parallel.{name}", "use 1 or more")
        model = self.tensor * self.pipeline * self.context
        if self.world % model:
            raise UserMistake(
                f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} = {model} does not divide "
                f"the {self.world} trainer ranks", "parallel",
                f"make cluster.trainers a multiple of {model}, or lower a degree")
        stage = self.world // self.pipeline
        if stage % (self.expert * self.expert_tensor):
            raise UserMistake(
                f"expert {self.expert} x expert_tensor {self.expert_tensor} does not divide the {stage} ranks of a "
                f"pipeline stage", "parallel.expert", f"use a divisor of {stage}")
        if self.sequence and self.tensor == 1:
            raise UserMistake("sequence parallelism needs tensor parallelism", "parallel.sequence",
                              "set parallel.tensor above 1 or leave parallel.sequence at auto")

    @classmethod
    def from_config(cls, config: Config) -> Layout:
        """The layout that `cluster.trainers` and `parallel` say; `parallel.sequence: auto` is on if tensor > 1."""
        parallel = config.parallel
        sequence = parallel.tensor > 1 if parallel.sequence == "auto" else parallel.sequence
        return cls(config.cluster.trainers, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert,
                   parallel.expert_tensor, sequence)

    @property
    def data(self) -> int:
        """Number of data-parallel ranks (each a block of tensor x pipeline x context ranks)."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Number of replicas of each expert shard."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def sequence_multiple(self) -> int:
        """Each sequence of a pack is padded to a multiple of this (2 * context for zig-zag context parallelism)."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """The whole pack is padded to a multiple of this, so that context and sequence parallel shares are equal."""
        share = self.context * (self.tensor if self.sequence else 1)
        unit = self.sequence_multiple
        return math.lcm(share, unit)

    def describe(self) -> str:
        """One line for the banner: `TP2+SP PP2 CP1 EP2 ETP1 DP2 (8 ranks)`."""
        tp = f"TP{self.tensor}" + ("+SP" if self.sequence else "")
        return (f"{tp} PP{self.pipeline} CP{self.context} EP{self.expert} ETP{self.expert_tensor} "
                f"DP{self.data} ({self.world} ranks)")


def check_model(layout: Layout, *, kv_heads: int, layers: int, experts: int = 0, ffn: int = 0) -> None:
    """Refuse a layout that the model cannot be cut into.

    Args:
        layout: the trainers' degrees.
        kv_heads, layers, experts, ffn: sizes of the model (experts 0 for a dense one; ffn of a dense layer or
            of one expert).
    Raises:
        UserMistake: names the key and what would be right.
    """
    def must_divide(degree: int, size: int, key: str, what: str) -> None:
        if size % degree:
            fits = [d for d in range(1, degree + 1) if size % d == 0]
            raise UserMistake(f"{degree} does not divide the model's {size} {what}", f"parallel.{key}",
                              f"use one of {fits}")

    if layout.tensor > kv_heads:  # else heads are padded with less than as many again
        must_divide(layout.tensor, kv_heads, "tensor", "key/value heads")
    must_divide(layout.pipeline, layers, "pipeline", "layers")
    if experts:
        must_divide(layout.expert, experts, "expert", "experts")
        must_divide(layout.expert_tensor, ffn, "expert_tensor", "expert FFN columns")
        if layout.tensor > 1 and not layout.sequence:
            raise UserMistake("a MoE model with tensor parallelism needs sequence parallelism", "parallel.sequence",
                              "set it to true or auto")
    else:
        must_divide(layout.tensor, ffn or layout.tensor, "tensor", "FFN columns")
        for name in ("expert", "expert_tensor"):
            if getattr(layout, name) > 1:
                raise UserMistake(f"{getattr(layout, name)} with a dense model", f"parallel.{name}", "set it to 1")
