"""Which sample trains on which data-parallel rank, in which micro-batch. Pure: the same lengths give the same plan on
every machine (integer arithmetic, no clock), so every rank may compute it for itself.

Three steps. Best-fit-decreasing says how many bins are needed; the count is rounded up to full slots. The bins are then
filled anew with an eye on cost, since the ranks of a *slot* (the micro-batches that run at the same time) wait for each
other wherever expert-parallel ranks exchange tokens. `data.levelling` swaps samples until the bins of a slot cost the
same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from megarl.data.levelling import Levelling
from megarl.errors import UserMistake

QUADRATIC = 3.5e-5
"""Cost of attention per token and token of length, relative to all other work per token.

Forward FLOPs per token: 2 x active parameters for the linear layers, 2 x layers x heads x head_dim x length for causal
attention (scores and values, half of the square). Qwen3-4B: 3.7e-5, Qwen3-235B-A22B: 3.5e-5, Qwen3-30B-A3B: 6e-5. At
3.5e-5 a sequence of 28 k tokens spends half of its work on attention."""

COST_UNIT = 1024  # costs are integers, in 1/1024 of one token's linear work: sums do not depend on their order


@dataclass(frozen=True)
class PackingPlan:
    """The micro-batches of one optimizer step.

    Attributes:
        bins: `bins[rank][slot]` = sample indices in increasing order; [] is an all-masked filler.
        oversized: samples above the cap, each alone in its bin; the caller warns about them.
        tokens: int64 [ranks, slots], padded tokens of each bin (0 for a filler).
        cost: int64 [ranks, slots], in COST_UNIT.
        best_fit_bins: how many bins best-fit-decreasing needs on one rank, before rounding up to full slots.
    """

    bins: list[list[list[int]]]
    oversized: list[int] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    cost: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    best_fit_bins: int = 0

    @property
    def slots(self) -> int:
        """Micro-batches on every rank."""
        return len(self.bins[0])

    def reordered(self, order: Sequence[int]) -> PackingPlan:
        """The same micro-batches with slot order[k] in place k."""
        at = list(order)
        return replace(self, bins=[[bins[slot] for slot in at] for bins in self.bins], tokens=self.tokens[:, at],
                       cost=self.cost[:, at])

    @property
    def balance(self) -> float:
        """Useful cost / (ranks x sum over slots of the most expensive bin); 1.0 means that nobody waits."""
        paid = int(self.cost.max(axis=0, initial=0).sum()) * self.cost.shape[0]
        return int(self.cost.sum()) / paid if paid else 1.0


def padded(length, multiple: int):
    """`length` (int or integer array) rounded up to a multiple."""
    return -(-length // multiple) * multiple


def sequence_cost(lengths: np.ndarray, quadratic: float = QUADRATIC) -> np.ndarray:
    """Cost of training on each sequence: length + quadratic x length^2, as int64 in COST_UNIT."""
    exact = np.asarray(lengths, np.float64)
    return np.rint(exact * COST_UNIT + (quadratic * COST_UNIT) * exact * exact).astype(np.int64)


def plan_packs(lengths: Sequence[int] | np.ndarray, *, ranks: int, max_tokens: int, sequence_multiple: int = 1,
               pack_multiple: int = 1, slots_multiple: int = 1, on_long: Literal["own", "error"] = "own",
               quadratic: float = QUADRATIC) -> PackingPlan:
    """Pack samples into micro-batches: few, never above the cap, and equally expensive at the same time.

    Invariants (asserted before the plan is returned):
        - every sample is in exactly one bin;
        - a bin's padded tokens, padded(sum of padded(length, sequence_multiple), pack_multiple), are at most
          `max_tokens`; only a bin with a single oversized sample may have more;
        - every rank has the same number of slots, a positive multiple of `slots_multiple`;
        - there are as many bins as best-fit-decreasing needs, rounded up to full slots on all ranks;
        - slots are ordered from the most to the least expensive.

    Args:
        lengths: tokens of each sample (prompt + response), at least 1.
        ranks: data-parallel ranks.
        max_tokens: cap of one bin in padded tokens (of the whole pack, before context parallelism slices it).
        sequence_multiple, pack_multiple: padding of each sequence and of the whole pack (config.layout.Layout).
        slots_multiple: what the pipeline schedule needs the number of micro-batches to be a multiple of.
        on_long: a sample above the cap gets a bin of its own, or is refused.
        quadratic: see QUADRATIC.
    Raises:
        UserMistake: a sample above the cap with on_long "error"; a cap below the smallest possible pack.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.ndim != 1 or (len(sizes) and sizes.min() < 1):
        raise ValueError("lengths must be a list of numbers of at least 1")
    cap = max_tokens // pack_multiple * pack_multiple
    if cap == 0:
        raise UserMistake(f"{max_tokens} tokens is below the smallest pack of this layout, {pack_multiple} tokens",
                          "batch.max_tokens", f"use at least {pack_multiple}")
    sizes = padded(sizes, sequence_multiple)
    oversized = [int(i) for i in np.flatnonzero(sizes > cap)]
    if oversized and on_long == "error":
        first = oversized[0]
        raise UserMistake(
            f"sample {first} has {int(lengths[first])} tokens ({int(sizes[first])} padded), the cap of a micro-batch "
            f"is {max_tokens}" + (f" ({len(oversized)} samples are above it)" if len(oversized) > 1 else ""),
            "batch.max_tokens", f"raise it to {int(padded(sizes.max(), pack_multiple))}, shorten responses, "
            "or set batch.on_long_sequence to own")
    costs = sequence_cost(sizes, quadratic)
    order = np.lexsort((np.arange(len(sizes)), -sizes)).tolist()
    best_fit = _best_fit(order, sizes.tolist(), cap)
    count = int(padded(max(len(best_fit), 1), ranks * slots_multiple))
    bins = _cheapest(order, sizes, costs, ranks, count, cap, best_fit)
    levelling = Levelling(bins, sizes, costs, ranks, cap)
    levelling.run()
    plan = _deal(levelling.slots_of_bins(), sizes, costs, ranks, pack_multiple, oversized, len(best_fit))
    _assert_invariants(plan, len(sizes), ranks, max_tokens, slots_multiple)
    return plan


def _best_fit(order: list[int], sizes: list[int], cap: int) -> list[list[int]]:
    """Best-fit-decreasing: each sample, longest first, into the bin with the least room that still takes it."""
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    bins: list[list[int]] = []
    for sample in order:
        size = sizes[sample]
        at = bisect_left(rooms, (size, -1))
        if at == len(rooms):
            bins.append([sample])
            insort(rooms, (cap - size, len(bins) - 1))
        else:
            room, chosen = rooms.pop(at)
            bins[chosen].append(sample)
            insort(rooms, (room - size, chosen))
    return bins


def _cheapest(order: list[int], sizes: np.ndarray, costs: np.ndarray, ranks: int, count: int, cap: int,
              best_fit: list[list[int]]) -> list[list[int]]:
    """`count` bins, by the first of three ways of filling that fits into them, or best-fit's if that waits less.

    The levelled ways need a little slack: they leave equal room everywhere, which nothing may fit into. Ending with
    best fit for the last tenth of the tokens, and filling slot after slot, need less of it.
    """
    def waiting(bins: list[list[int]]) -> int:
        spent = sorted((sum(cost[i] for i in one) for one in bins), reverse=True)
        return sum(spent[::ranks])

    cost = costs.tolist()
    fallback = best_fit + [[] for _ in range(count - len(best_fit))]
    for fit_share in (0.0, 0.1, None):
        pool = _Pool(order, sizes, costs)
        bins = _fill(pool, ranks, count // ranks, cap, fit_share)
        if bins is not None:
            return min(bins, fallback, key=waiting)
    return fallback


class _Pool:
    """Samples not yet in a bin, by size; sizes and costs ascend together."""

    def __init__(self, order: list[int], sizes: np.ndarray, costs: np.ndarray) -> None:
        self.samples = order[::-1]
        self.sizes = sizes[self.samples].tolist()
        self.costs = costs[self.samples].tolist()

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, at: int = -1) -> tuple[int, int, int]:
        """Remove one, the largest by default: (sample, size, cost)."""
        return self.samples.pop(at), self.sizes.pop(at), self.costs.pop(at)

    def take_within(self, room: int, budget: int) -> tuple[int, int, int] | None:
        """Remove the largest of at most `room` tokens and `budget` cost; None if there is none."""
        at = min(bisect_right(self.sizes, room), bisect_right(self.costs, budget))
        return self.take(at - 1) if at else None


def _fill(pool: _Pool, ranks: int, slots: int, cap: int, fit_share: float | None) -> list[list[int]] | None:
    """Fill `slots` x `ranks` bins with the pool, slots of expensive bins first; None if something is left over.

    A slot whose cost is dictated by its longest sample (nothing can make the others as expensive) is filled at once,
    as densely as possible. The rest of the slots are filled together to common levels, or (fit_share None) one by one.
    """
    bins: list[list[int]] = []
    while slots:
        levels, density = _levels(pool, ranks, slots, cap)
        longest = pool.costs[-1] if pool else 0
        if fit_share is not None and levels[0] > longest:
            rest = _fill_levelled(pool, ranks, levels, density, cap, fit_share)
            return None if rest is None else bins + rest
        budget = longest if levels[0] <= longest else None
        bins += _fill_slot(pool, ranks, cap, budget)
        slots -= 1
    return bins if not pool else None


def _fill_slot(pool: _Pool, ranks: int, cap: int, budget: int | None) -> list[list[int]]:
    """One slot: again and again the cheapest bin takes the longest sample that fits, up to a cost of `budget`."""
    bins: list[list[int]] = [[] for _ in range(ranks)]
    heap = []  # (cost, bin, room)
    for index in range(min(ranks, len(pool))):
        sample, size, cost = pool.take()
        bins[index].append(sample)
        heap.append((cost, index, cap - size))
    heapq.heapify(heap)
    while heap and pool:
        spent, index, room = heap[0]
        found = pool.take_within(room, pool.costs[-1] if budget is None else budget - spent)
        if found is None:
            heapq.heappop(heap)
            continue
        bins[index].append(found[0])
        heapq.heapreplace(heap, (spent + found[2], index, room - found[1]))
    return bins


def _levels(pool: _Pool, ranks: int, slots: int, cap: int) -> tuple[list[int], float]:
    """The cost to which each slot should be filled, and the mean cost per token of what is filled in.

    Every slot starts from the `ranks` longest samples left ("seeds"), one in each of its bins. Raising a slot's level
    costs all ranks time and makes room in those bins only that are not full yet. So all levels are raised to where the
    first p bins of a slot are full, for the least p that makes enough room, and then lowered together while it lasts.
    """
    count = ranks * slots
    head = min(count, len(pool))
    size, cost = np.zeros(count, np.int64), np.zeros(count, np.int64)
    size[:head], cost[:head] = pool.sizes[::-1][:head], pool.costs[::-1][:head]
    tokens_left = sum(pool.sizes) - int(size.sum())
    need = sum(pool.costs) - int(cost.sum())
    density = need / tokens_left if tokens_left else 1.0
    full = (cost + np.rint(density * (cap - size)).astype(np.int64)).reshape(slots, ranks)
    cost = cost.reshape(slots, ranks)
    longest, by_room = cost[:, 0], np.sort(full, axis=1)

    def room(level: np.ndarray) -> int:
        return int((np.minimum(full, level[:, None]) - cost).clip(0).sum())

    level = by_room[:, -1]
    for p in range(ranks):
        if room(np.maximum(longest, by_room[:, p])) >= need:
            level = by_room[:, p]
            break
    low, high = 0, int(level.max())
    while high - low > COST_UNIT:
        middle = (low + high) // 2
        if room(np.maximum(longest, level - middle)) >= need:
            low = middle
        else:
            high = middle
    return np.maximum(longest, level - low).tolist(), density


def _fill_levelled(pool: _Pool, ranks: int, levels: list[int], density: float, cap: int,
                   fit_share: float) -> list[list[int]] | None:
    """All slots together: each sample, longest first, into the bin with the most room below its level.

    Room is measured in cost; free tokens count as `density` each. The last `fit_share` of the tokens goes by best fit.
    """
    bins: list[list[int]] = [[] for _ in range(ranks * len(levels))]
    heap = []  # (-room below the level or the cap, bin, room below the level, free tokens)

    def entry(index: int, budget: int, free: int) -> tuple[float, int, int, int]:
        return -min(budget, density * free), index, budget, free

    for index in range(min(len(bins), len(pool))):
        sample, size, cost = pool.take()
        bins[index].append(sample)
        heap.append(entry(index, levels[index // ranks] - cost, cap - size))
    heapq.heapify(heap)
    tail = int(np.searchsorted(np.cumsum(pool.sizes), fit_share * sum(pool.sizes))) if pool else 0
    while len(pool) > tail:
        sample, size, cost = pool.take()
        too_full = []
        while heap and heap[0][3] < size:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        _, index, budget, free = heap[0]
        bins[index].append(sample)
        heapq.heapreplace(heap, entry(index, budget - cost, free - size))
        for one in too_full:
            heapq.heappush(heap, one)
    rooms = sorted((free, index) for _, index, _, free in heap)
    while pool:
        sample, size, _ = pool.take()
        at = bisect_left(rooms, (size, -1))
        if at == len(rooms):
            return None
        free, index = rooms.pop(at)
        bins[index].append(sample)
        insort(rooms, (free - size, index))
    return bins


def _deal(slots: list[list[list[int]]], sizes: np.ndarray, costs: np.ndarray, ranks: int, pack_multiple: int,
          oversized: list[int], best_fit_bins: int) -> PackingPlan:
    """Deal the bins of each slot to the ranks, the most expensive to the rank with the least so far."""
    bins: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for slot in slots:
        spent = [(int(costs[one].sum()) if one else 0, one) for one in slot]
        spent.sort(key=lambda pair: (-pair[0], pair[1]))
        receivers = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        for rank, (cost, one) in zip(receivers, spent, strict=True):
            bins[rank].append(sorted(one))
            total[rank] += cost
    tokens = [[int(padded(sizes[one].sum(), pack_multiple)) if one else 0 for one in row] for row in bins]
    cost = [[int(costs[one].sum()) if one else 0 for one in row] for row in bins]
    return PackingPlan(bins, oversized, np.array(tokens, np.int64), np.array(cost, np.int64), best_fit_bins)


def _assert_invariants(plan: PackingPlan, samples: int, ranks: int, max_tokens: int, slots_multiple: int) -> None:
    """The promises of `plan_packs`; an AssertionError here is a bug of this module."""
    seen = np.sort(np.array([i for row in plan.bins for one in row for i in one], np.int64))
    assert np.array_equal(seen, np.arange(samples)), "a sample is missing or packed twice"
    assert len(plan.bins) == ranks and all(len(row) == plan.slots for row in plan.bins), "ranks differ in slots"
    assert plan.slots > 0 and plan.slots % slots_multiple == 0, "slots do not fit the schedule"
    assert plan.slots == padded(max(plan.best_fit_bins, 1), ranks * slots_multiple) // ranks, "too many bins"
    alone = {i for row in plan.bins for one in row if len(one) == 1 for i in one}
    assert alone.issuperset(plan.oversized), "an oversized sample has company"
    assert int((plan.tokens > max_tokens).sum()) == len(plan.oversized), "a bin is above the cap"
    assert (np.diff(plan.cost.max(axis=0)) <= 0).all(), "slots are out of order"
