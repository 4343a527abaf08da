"""The parallel degrees of the trainers: the one place that says which combinations are possible.

Pure: no torch. Used by the config check (before a job is queued) and by `cluster.groups` (when it starts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserMistake
from megarl.pipeline.schedule import PlacementName, placement

if TYPE_CHECKING:
    from megarl.config.schema import Config


FP8_TOKENS = 32  # of its recipes the most (MXFP8's blocks)


@dataclass(frozen=True)
class Layout:
    """Degrees of one trainer partition. `world` = tensor * pipeline * context * data.

    Expert parallelism is laid inside tensor x context x data of one pipeline stage, as in Megatron-core:
    tensor * context * data = expert_tensor * expert * expert_data.

    Attributes:
        placement: which pipeline rank holds which stages (`pipeline.schedule.placement`).
        chunks: stages on each pipeline rank; 2 where placement is v or mirrored.
        tokens: each rank's share of a pack is a multiple of this; matrix products in FP8 need it.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    placement: PlacementName = "looped"
    chunks: int = 1
    tokens: int = 1

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
        if self.placement == "mirrored" and self.pipeline % 2:
            raise UserMistake(f"dualpipe puts every stage on two ranks, {self.pipeline} is odd", "parallel.pipeline",
                              "use an even number, or pipeline.schedule: dualpipev")
        assert self.chunks == 2 or self.placement == "looped"

    @classmethod
    def from_config(cls, config: Config) -> Layout:
        """The layout that `cluster.trainers`, `parallel` and `pipeline` say.

        `parallel.sequence: auto` is on if tensor > 1; where `pipeline.schedule` is auto, `pipeline.choose` says where
        the stages are.
        """
        parallel = config.parallel
        sequence = parallel.tensor > 1 if parallel.sequence == "auto" else parallel.sequence
        degrees = (config.cluster.trainers, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert,
                   parallel.expert_tensor, sequence)
        tokens = FP8_TOKENS if config.megatron.get("fp8") or config.megatron.get("fp4") else 1
        if parallel.pipeline == 1:
            return cls(*degrees, tokens=tokens)
        name, chunks = stage_placement(config, cls(*degrees))
        return cls(*degrees, name, chunks, tokens)

    @property
    def data(self) -> int:
        """Number of data-parallel ranks (each a block of tensor x pipeline x context ranks)."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Number of replicas of each expert shard, for each of a pipeline's mirrors."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def stages(self) -> int:
        """Stages that the layers are cut into."""
        return len(self.placement_table)

    @property
    def placement_table(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the pipeline ranks that hold it."""
        return placement(self.placement, self.pipeline, self.chunks)

    @property
    def mirrors(self) -> int:
        """On how many ranks of a pipeline each stage is.

        Mirrored ranks r and P-1-r hold the same stages, so to Megatron-core, whose groups, distributed optimizer and
        checkpoints ask only who holds the same weights, they are data-parallel ranks of a pipeline half as long.
        """
        return 2 if self.placement == "mirrored" else 1

    @property
    def sequence_multiple(self) -> int:
        """Each sequence of a pack is padded to a multiple of this (2 * context for zig-zag context parallelism)."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """The whole pack is padded to a multiple of this, so that context and sequence parallel shares are equal."""
        share = self.context * (self.tensor if self.sequence else 1)
        unit = self.sequence_multiple
        return math.lcm(share * self.tokens, unit)

    def describe(self) -> str:
        """One line for the banner: `TP2+SP PP2 CP1 EP2 ETP1 DP2 (8 ranks)`."""
        tp = f"TP{self.tensor}" + ("+SP" if self.sequence else "")
        where = "" if self.chunks == 1 else f"x{self.chunks}" if self.placement == "looped" else f" {self.placement}"
        return (f"{tp} PP{self.pipeline}{where} CP{self.context} EP{self.expert} ETP{self.expert_tensor} "
                f"DP{self.data} ({self.world} ranks)")


def stage_placement(config: Config, layout: Layout) -> tuple[PlacementName, int]:
    """Where `pipeline.schedule` puts stages: (placement, stages a rank); `layout` has the degrees.

    auto expects micro-batches that are full, as many as responses of half the permitted length make.
    """
    from megarl.model.hf_config import HFConfig
    from megarl.pipeline.choose import choose_placement
    from megarl.pipeline.generators import SCHEDULES

    name = config.pipeline.schedule
    if name != "auto":
        family = SCHEDULES[name]
        return family.placement, config.pipeline.chunks if name == "interleaved" else family.chunks
    if not (Path(config.model.path) / "config.json").is_file():  # the check tells
        return "looped", 1
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt / config.batch.minibatches
    tokens = samples * (config.data.max_prompt_tokens + config.rollout.max_response_tokens) / 2 / layout.data
    microbatches = math.ceil(tokens / config.batch.max_tokens)
    chosen, _ = choose_placement(layout.pipeline, HFConfig.read(config.model.path).layers, [1.0] * microbatches,
                                 memory=config.pipeline.memory)
    return chosen, 1 if chosen == "looped" else 2


def check_model(layout: Layout, *, kv_heads: int, experts: int = 0, ffn: int = 0, beside: Sequence[int] = (),
                padded_heads: bool = True) -> None:
    """Refuse a layout that the model's layers cannot be cut into (`stages.parts` cuts the model into layers).

    Args:
        layout: the trainers' degrees.
        kv_heads, experts, ffn: sizes of the model (experts 0 for a dense one; ffn of a dense layer or
            of one expert).
        beside: inner sizes of a MoE model's MLPs that are no routed experts.
        padded_heads: whether heads that the degree does not divide can be padded.
    Raises:
        UserMistake: names the key and what would be right.
    """
    def must_divide(degree: int, size: int, key: str, what: str) -> None:
        if size % degree:
            fits = [d for d in range(1, degree + 1) if size % d == 0]
            raise UserMistake(f"{degree} does not divide the model's {size} {what}", f"parallel.{key}",
                              f"use one of {fits}")

    if layout.tensor > kv_heads or not padded_heads:  # else heads are padded with less than as many again
        must_divide(layout.tensor, kv_heads, "tensor", "key/value heads")
    if experts:
        must_divide(layout.expert, experts, "expert", "experts")
        must_divide(layout.expert_tensor, ffn, "expert_tensor", "expert FFN columns")
        if layout.tensor > 1 and not layout.sequence:
            raise UserMistake("a MoE model with tensor parallelism needs sequence parallelism", "parallel.sequence",
                              "set it to true or auto")
        for size in beside:
            must_divide(layout.tensor, size, "tensor", "FFN columns")
    else:
        must_divide(layout.tensor, ffn or layout.tensor, "tensor", "FFN columns")
        for name in ("expert", "expert_tensor"):
            if getattr(layout, name) > 1:
                raise UserMistake(f"{getattr(layout, name)} with a dense model", f"parallel.{name}", "set it to 1")
