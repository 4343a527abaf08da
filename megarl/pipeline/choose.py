"""Which placement a run gets, and which schedule within it each step gets: the one that is cheapest on paper. Pure.

Where stages are cannot change during a run. Equal arguments give the same answer on every rank: the simulator is equal
to the bit, and ties go to the schedule that is named first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megarl.pipeline.order import order
from megarl.pipeline.schedule import PlacementName
from megarl.pipeline.simulate import Costs, simulator

_CANDIDATES: dict[tuple[PlacementName, bool], tuple[str, ...]] = {  # (placement, several chunks) -> by preference
    ("looped", False): ("1f1b", "zb-h1"),
    ("looped", True): ("interleaved",),
    ("v", True): ("zb-v", "dualpipev"),  # a tie goes to the one that holds fewer activations
    ("mirrored", True): ("dualpipe",),
}


class Estimate(NamedTuple):
    """A schedule's price; `memory` is the peak in one micro-batch's activations of 1/P of the model."""

    name: str
    makespan: float
    memory: float


def estimates(placement: PlacementName, ranks: int, chunks: int, costs: Costs, reorder: bool = False) -> list[Estimate]:
    """The prices of all schedules that `choose` takes for a placement, under the names that one can ask for."""
    found = []
    for name in _CANDIDATES[placement, chunks > 1]:
        mine = costs.reordered(order(costs, name, ranks, chunks)) if reorder else costs
        line = simulator(name, ranks, costs.microbatches, chunks).run(mine)
        found.append(Estimate(name, line.makespan, max(line.peak_memory)))
    return found


@lru_cache(maxsize=256)
def choose(placement: PlacementName, ranks: int, chunks: int, costs: Costs, memory: float | None = None,
           reorder: bool = False) -> str:
    """The cheapest schedule of one step.

    Args:
        placement, ranks, chunks: of the run; `chunks` are stages a rank.
        costs: of the step's micro-batches, in the order in which they come.
        memory: how many micro-batches' activations of 1/P of the model a rank can hold; None: enough. If no schedule
            keeps within it, the one that holds least is taken.
        reorder: whether each schedule will have the micro-batches in its own order (`order`), and is priced so.
    Returns:
        A name in `generators.SCHEDULES`; with few micro-batches its fallback is what was priced and will run.
    """
    return _best(estimates(placement, ranks, chunks, costs, reorder), memory).name


def choose_placement(ranks: int, layers: int, lengths: Sequence[float], *, memory: float | None = None,
                     ratio: tuple[float, float, float] = (1.0, 1.0, 1.0), hop: float = 0.0,
                     hidden: float = 0.0, reorder: bool = False) -> tuple[PlacementName, str]:
    """Where the stages of a run go: looped (one stage a rank) or in a V (two), whichever has the cheaper schedule.

    Args:
        ranks: P.
        layers: of the model; a V has 2P stages, which need a layer each.
        lengths: expected lengths in tokens of the micro-batches of a step, in order.
        memory, reorder: as in `choose`.
        ratio: F : I : W.
        hop: time of one transfer as a share of a forward of 1/P of the model on a micro-batch of mean length.
        hidden: share of F and of I that is communication which a pair hides (0 where pairs are sequential).
    Returns:
        The placement, and why, for the log.
    """
    if ranks == 1:
        return "looped", "one pipeline rank"
    if layers < 2 * ranks:
        return "looped", f"{layers} layers are too few for the {2 * ranks} stages of a V"
    mean = math.fsum(lengths) / len(lengths)
    weights = [length / mean for length in lengths]
    found: list[tuple[PlacementName, Estimate]] = []
    for placement, chunks in (("looped", 1), ("v", 2)):
        costs = model_costs(ranks, ranks * chunks, weights, ratio, hop * ratio[0], hidden)
        found.append((placement, _best(estimates(placement, ranks, chunks, costs, reorder), memory)))
    best = _best([estimate for _, estimate in found], memory)
    placement = next(name for name, estimate in found if estimate is best)
    work = math.fsum(ratio) * len(weights)
    return placement, (f"{best.name} is the cheapest of 1f1b, zb-h1, zb-v and dualpipev for {len(weights)} "
                       f"micro-batches: {best.makespan / work:.3f} times a rank's work, {best.memory:g} micro-batches' "
                       "activations" + ("" if memory is None else f" of {memory:g}"))


def model_costs(ranks: int, stages: int, weights: Sequence[float], ratio: Sequence[float], hop: float = 0.0,
                hidden: float = 0.0) -> Costs:
    """Costs that can be compared between placements.

    Args:
        weights: of each micro-batch.
        ratio: F, I and W of 1/P of the model for a micro-batch of weight 1; a stage may be a part of that.
        hop: time of a transfer.
        hidden: as in `choose_placement`.
    """
    forward, input_grad, weight_grad = (part * ranks / stages for part in ratio)
    return Costs.scaled(stages, weights, forward=forward, input_grad=input_grad, weight_grad=weight_grad,
                        hidden=hidden * min(forward, input_grad), hop=hop)


def _best(found: Sequence[Estimate], memory: float | None) -> Estimate:
    """The least makespan within the memory, the first of equals; if none keeps within it, the least memory."""
    within = [estimate for estimate in found if memory is None or estimate.memory <= memory]
    if within:
        return min(within, key=lambda estimate: estimate.makespan)
    return min(found, key=lambda estimate: (estimate.memory, estimate.makespan))
