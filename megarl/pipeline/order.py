"""In which order micro-batches of unequal length go through a pipeline: the order that takes least time on paper. Pure.

A pipeline waits wherever a long micro-batch follows a short one. Two things help: short ones at the start (the last
rank begins sooner) and at the end (the first rank ends sooner), and neighbours of nearly equal length. So the first
candidates are hills: ascending up to the longest, descending from there. How many go before the longest depends on the
schedule, so that every such number is tried (0: long first; all: short first). Then single micro-batches are moved or
exchanged as long as a fixed number of trials finds something better. The number is counted, not timed, and the trials
come from a fixed seed: every rank finds the same order.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np

from megarl.pipeline.simulate import Costs, Simulator, simulator

_TRIALS = 32  # orders that are priced together
_EFFORT = 500_000  # trials x items of the schedule
_MOST_ROUNDS = 32


@lru_cache(maxsize=256)
def order(costs: Costs, name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The order of the micro-batches; by the simulator no slower than the one in which they came.

    Args:
        costs: of the micro-batches in the order in which they came.
        name, ranks, chunks: as for `generators.fitting`.
    Returns:
        For each place of the schedule the micro-batch that runs there.
    """
    arrival = np.arange(costs.microbatches)
    if costs == costs.reordered(np.zeros_like(arrival)):
        return tuple(arrival.tolist())  # all are equal
    simulated = simulator(name, ranks, costs.microbatches, chunks)
    items = sum(len(items) for items in simulated.schedule.items)
    candidates = [arrival, short_at_both_ends(costs), *hills(costs, max(_EFFORT // items, 8))]
    best, least = _first_best(simulated, costs, np.stack(candidates))
    draw = random.Random(0)
    for _ in range(min(_EFFORT // (_TRIALS * items), _MOST_ROUNDS)):
        trial, makespan = _first_best(simulated, costs, np.stack([_changed(best, draw) for _ in range(_TRIALS)]))
        if makespan < least:
            best, least = trial, makespan
    return tuple(best.tolist())


def hills(costs: Costs, most: int = 1000) -> list[np.ndarray]:
    """int64 [M] orders with 0, 1, ... M micro-batches before the longest, chosen evenly over all lengths.

    `most`: at least 2; of more, so many at even distances.
    """
    shortest_first = np.argsort(_seconds(costs), kind="stable")
    count = len(shortest_first)
    found = []
    for rise in range(count + 1) if count < most else sorted({k * count // (most - 1) for k in range(most)}):
        before = np.diff(np.arange(count + 1) * rise // max(count, 1)) > 0
        found.append(np.concatenate((shortest_first[before], shortest_first[~before][::-1])))
    return found


def long_first(costs: Costs) -> np.ndarray:
    """The order from the longest to the shortest."""
    return np.argsort(-_seconds(costs), kind="stable")


def short_at_both_ends(costs: Costs) -> np.ndarray:
    """The order that takes the shortest left for the front and for the back in turn."""
    shortest_first = np.argsort(_seconds(costs), kind="stable")
    return np.concatenate((shortest_first[::2], shortest_first[1::2][::-1]))


def _seconds(costs: Costs) -> np.ndarray:
    """For each micro-batch the work of all stages; added stage by stage, so that it is equal to the bit everywhere."""
    total = np.zeros(costs.microbatches)
    for stage in range(costs.stages):
        total += costs.forward[stage] + costs.input_grad[stage] + costs.weight_grad[stage]
    return total


def _first_best(simulated: Simulator, costs: Costs, orders: np.ndarray) -> tuple[np.ndarray, float]:
    makespans = simulated.makespans(costs, orders)
    at = int(makespans.argmin())
    return orders[at], float(makespans[at])


def _changed(best: np.ndarray, draw: random.Random) -> np.ndarray:
    """One micro-batch moved elsewhere, or two exchanged."""
    one, two = (int(draw.random() * len(best)) for _ in range(2))
    changed = best.copy()
    if draw.random() < 0.5:
        changed[[one, two]] = best[[two, one]]
    elif one < two:
        changed[one:two], changed[two] = best[one + 1:two + 1], best[one]
    else:
        changed[two + 1:one + 1], changed[two] = best[two:one], best[one]
    return changed
