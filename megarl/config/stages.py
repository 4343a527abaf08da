"""Which layers each pipeline stage has. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.config.layout import Layout
from megarl.errors import UserMistake

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig


@dataclass(frozen=True)
class Part:
    """One stage's part of the model: the embedding on the first stage, the final norm and the head on the last.

    Attributes:
        stage, stages: which of how many.
        first_layer, layers: layers [first_layer, first_layer + layers) of the model.
    """

    stage: int
    stages: int
    first_layer: int
    layers: int

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the head is here."""
        return self.stage == self.stages - 1


def parts(hf: HFConfig, layout: Layout, given: Literal["auto"] | Sequence[int] = "auto") -> tuple[Part, ...]:
    """The model cut into `layout.stages` parts.

    Args:
        hf: the model's sizes.
        layout: says how many stages there are, and which rank has which.
        given: `parallel.layers_per_stage`: layers of each stage, or auto: no rank computes longer than it must, the
            head counted as the layers that cost as much, every stage with a layer at least.
    Raises:
        UserMistake: fewer layers than stages, or a list that does not fit.
    """
    stages = layout.stages
    if stages > hf.layers:
        raise UserMistake(f"{layout.pipeline} ranks with {layout.chunks} stage{'s' * (layout.chunks > 1)} each need "
                          f"{stages} layers, the model has {hf.layers}", "parallel.pipeline",
                          f"use at most {hf.layers // layout.chunks}")
    layers = balanced(hf.layers, layout.placement_table, head_in_layers(hf)) if given == "auto" else list(given)
    if len(layers) != stages or sum(layers) != hf.layers:
        raise UserMistake(f"{layers} are {len(layers)} stages with {sum(layers)} layers; the layout has {stages} "
                          f"stages, the model {hf.layers} layers", "parallel.layers_per_stage",
                          f"give {stages} numbers that add up to {hf.layers}, or auto")
    return tuple(Part(stage, stages, sum(layers[:stage]), count) for stage, count in enumerate(layers))


def balanced(layers: int, placement: Sequence[Sequence[int]], head: float) -> list[int]:
    """Layers of each stage such that the busiest rank has as little as possible.

    Layer after layer goes to the stage whose rank has the least so far (then: the least itself, then the later stage,
    which holds fewer activations); for jobs of equal size this greedy rule is optimal.

    Args:
        layers: of the model; at least one a stage.
        placement: for each stage the ranks that hold it (one of them, where it is mirrored, stands for all).
        head: cost of the head in layers.
    """
    ranks = [min(holders) for holders in placement]
    counts, last = [1] * len(ranks), len(ranks) - 1

    def own(stage: int) -> float:
        return counts[stage] + head * (stage == last)

    def load(stage: int) -> float:
        return sum(own(other) for other, rank in enumerate(ranks) if rank == ranks[stage])

    for _ in range(layers - len(ranks)):
        counts[min(range(len(ranks)), key=lambda stage: (load(stage), own(stage), -stage))] += 1
    return counts


def head_in_layers(hf: HFConfig) -> float:
    """What the head costs, in layers: multiplications per token, without attention's scores.

    The head's logits are computed once more in the backward pass instead of being kept: 4 products instead of 3.
    """
    attention = 2 * hf.hidden * hf.head_dim * (hf.heads + hf.kv_heads)
    if sizes := hf.latent:
        queries = sizes.q_rank * (hf.hidden + hf.heads * hf.head_dim) or hf.hidden * hf.heads * hf.head_dim
        attention = (queries + hf.hidden * (sizes.kv_rank + sizes.rotated + hf.heads * sizes.value)
                     + sizes.kv_rank * hf.heads * (sizes.plain + sizes.value))
    mlp = 3 * hf.hidden * (hf.moe_ffn * hf.top_k + hf.shared_ffn if hf.experts else hf.ffn)
    return 4 / 3 * hf.vocab * hf.hidden / (attention + mlp)
