"""Making the bins of a slot equally expensive by swapping samples between them. Used by `data.packing`; pure."""

from __future__ import annotations

from functools import cache

import numpy as np

PAIRS_UP_TO = 9  # bins of at most so many samples also offer pairs of samples for a swap
OFFERS = 64  # at most so many offers of a bin are looked at, evenly spread over its lengths
TOLERANCE = 5e-4  # a slot is level when its ranks wait for less than this share of its cost
TAKERS = 12  # bins of other slots that a trade looks at
EVALUATIONS = 400  # bound on the pairs of bins looked at: bounds the time without a clock


class Levelling:
    """Local search over a packing; the number of bins and the cap are kept.

    A *slot* is `ranks` bins that run at the same time; sorting all bins by cost and cutting the row into slots gives
    the least waiting for given bins. What is minimised is the sum over slots of the most expensive bin.

    Args:
        bins: sample indices of each bin; a multiple of `ranks` bins. Not changed.
        sizes, costs: int64 [samples], padded tokens and cost; cost grows with size.
        ranks: bins of a slot.
        cap: most tokens of a bin (a bin that is above it already may not gain any).
    """

    def __init__(self, bins: list[list[int]], sizes: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> None:
        self.bins = [list(one) for one in bins]
        self.sizes, self.costs, self.ranks, self.cap = sizes, costs, ranks, cap
        self.load = [int(sizes[one].sum()) if one else 0 for one in bins]
        self.cost = [int(costs[one].sum()) if one else 0 for one in bins]
        self.offers: list[tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]] | None] = [None] * len(bins)
        self.evaluations = 0

    def run(self) -> None:
        """Level every slot, regroup the bins by their new cost, and once more; then trade between slots."""
        for _ in range(2):
            for slot in self._slots():
                self._level(slot)
        self._trade()

    def slots_of_bins(self) -> list[list[list[int]]]:
        """The samples of each bin of each slot, the most expensive first."""
        return [[self.bins[index] for index in slot] for slot in self._slots()]

    def _slots(self) -> list[list[int]]:
        order = sorted(range(len(self.bins)), key=lambda index: (-self.cost[index], index))
        return [order[at:at + self.ranks] for at in range(0, len(order), self.ranks)]

    def _level(self, slot: list[int], moves: int = 24) -> None:
        """Swap between the most expensive bin of a slot and its cheapest ones until it is level or nothing helps."""
        for _ in range(moves):
            order = sorted(slot, key=lambda index: (self.cost[index], index))
            most, total = self.cost[order[-1]], sum(self.cost[index] for index in slot)
            if most * self.ranks - total <= TOLERANCE * total or self.evaluations > EVALUATIONS:
                return
            for cheap in order[:3]:
                gap = most - self.cost[cheap]
                moved = self._swap(order[-1], cheap, aim=gap // 2, most=gap - 1, least=gap // 32)
                if moved:
                    break
            else:
                return

    def _trade(self) -> None:
        """Lower the most expensive bin of the slots that wait most, by swaps with bins of other slots.

        The taker stays below the most expensive bin of its own slot, so no slot gets dearer.
        """
        slots = self._slots()
        stuck: set[int] = set()
        floor = TOLERANCE * sum(self.cost) / len(slots)
        while self.evaluations < EVALUATIONS:
            most = [max(self.cost[index] for index in slot) for slot in slots]
            waiting = [top - sum(self.cost[index] for index in slot) // self.ranks
                       for top, slot in zip(most, slots, strict=True)]
            open_slots = [number for number in range(len(slots))
                          if number not in stuck and waiting[number] * self.ranks > floor]
            if not open_slots:
                return
            dear = max(open_slots, key=lambda number: (waiting[number], -number))
            giver = max(slots[dear], key=lambda index: (self.cost[index], -index))
            gaps = sorted(((most[number] - self.cost[index], index) for number, slot in enumerate(slots)
                           for index in slot if number != dear), reverse=True)
            for gap, taker in gaps[:TAKERS]:
                if self._swap(giver, taker, aim=waiting[dear], most=gap, least=waiting[dear] // 16):
                    break
            else:
                stuck.add(dear)

    def _swap(self, giver: int, taker: int, aim: int, most: int, least: int) -> int:
        """Move a cost of about `aim`, within [least, most], from one bin to another; return what was moved, or 0.

        Each side offers nothing, one sample, or a pair; both bins stay below the cap.
        """
        if most < max(least, 1):
            return 0
        self.evaluations += 1
        size_a, cost_a, offers_a = self._offers(giver)
        size_b, cost_b, offers_b = self._offers(taker)
        moved = cost_a[:, None] - cost_b
        tokens = size_a[:, None] - size_b
        allowed = ((moved >= max(least, 1)) & (moved <= most) & (tokens <= max(self.cap - self.load[taker], 0))
                   & (tokens >= min(self.load[giver] - self.cap, 0)))
        if not allowed.any():
            return 0
        a, b = divmod(int(np.where(allowed, abs(moved - aim), np.iinfo(np.int64).max).argmin()), len(cost_b))
        out, back = offers_a[a], offers_b[b]
        self._apply(giver, taker, out, back, int(tokens[a, b]), int(moved[a, b]))
        return int(moved[a, b])

    def _apply(self, giver: int, taker: int, out: tuple[int, ...], back: tuple[int, ...], tokens: int,
               cost: int) -> None:
        for source, target, samples in ((giver, taker, out), (taker, giver, back)):
            for sample in samples:
                self.bins[source].remove(sample)
                self.bins[target].append(sample)
        for index, sign in ((giver, -1), (taker, 1)):
            self.load[index] += sign * tokens
            self.cost[index] += sign * cost
            self.offers[index] = None

    def _offers(self, index: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]:
        """What a bin can give in a swap: tokens and cost of each offer, and its samples."""
        if self.offers[index] is None:
            samples = self.bins[index]
            if len(samples) > OFFERS:
                samples = sorted(samples, key=lambda i: (self.sizes[i], i))[::len(samples) // OFFERS + 1]
            size, cost = self.sizes[samples], self.costs[samples]
            sets: list[tuple[int, ...]] = [(), *((i,) for i in samples)]
            zero = np.zeros(1, np.int64)
            if 2 <= len(samples) <= PAIRS_UP_TO:
                first, second = _pairs(len(samples))
                sets += [(samples[a], samples[b]) for a, b in zip(first, second, strict=True)]
                size = np.concatenate((zero, size, size[first] + size[second]))
                cost = np.concatenate((zero, cost, cost[first] + cost[second]))
            elif samples:
                size, cost = np.concatenate((zero, size)), np.concatenate((zero, cost))
            else:
                size = cost = zero
            self.offers[index] = (size, cost, sets)
        return self.offers[index]


@cache
def _pairs(count: int) -> tuple[list[int], list[int]]:
    """Indices of all pairs out of `count`."""
    first, second = np.triu_indices(count, 1)
    return first.tolist(), second.tolist()
