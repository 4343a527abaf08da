"""What a schedule costs: when each item runs, how long ranks wait, how many activations they hold. Pure: numpy only.

A rank runs its list in order. An item starts as soon as its rank is free and all its inputs (of a pair: both) have
arrived, so its end is the longest path to it in a fixed graph. The graph is made once per schedule (`Simulator`) and
walked level by level, for one set of costs or for many orders of the micro-batches at a time.

Only additions and maxima of float64 in a fixed order: equal costs give equal bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megarl.pipeline.generators import fitting
from megarl.pipeline.schedule import Item, Op, Pair, Schedule, parts

# planes of the table of durations; an item's duration is the sum of two of them
_F, _B, _I, _W, _F_PAIRED, _B_PAIRED, _NOTHING = range(7)
_PLANE = {"F": _F, "B": _B, "I": _I, "W": _W}


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of each operation. A full backward takes input_grad + weight_grad.

    Attributes:
        forward, input_grad, weight_grad: float64 [stages, microbatches].
        hidden: float64 [stages, microbatches]: how much of a forward, and again of an input gradient, is communication
            that disappears behind the partner when the operation runs in a pair. A pair takes F + B minus the hidden
            part of its forward minus that of its backward. 0: partners run one after the other (CPU).
        hop: float64 [microbatches]: from the end of the sender's item to the arrival on another rank. It occupies
            neither rank.
    """

    forward: np.ndarray
    input_grad: np.ndarray
    weight_grad: np.ndarray
    hidden: np.ndarray
    hop: np.ndarray

    def __post_init__(self) -> None:
        shape = self.forward.shape
        for name in ("forward", "input_grad", "weight_grad", "hidden", "hop"):
            array = getattr(self, name)
            if array.dtype != np.float64 or array.shape != (shape[1:] if name == "hop" else shape):
                raise ValueError(f"costs: {name} is {array.dtype} {list(array.shape)}, forward is {list(shape)}")
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise ValueError(f"costs: {name} has a negative or infinite value")
        if (self.hidden > np.minimum(self.forward, self.input_grad)).any():
            raise ValueError("costs: a pair cannot hide more than an operation takes")

    @classmethod
    def scaled(cls, stages: int, weights, *, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
               hidden: float = 0.0, hop: float | np.ndarray = 0.0) -> Costs:
        """Equal stages; micro-batch m takes weights[m] times the given seconds. `hop` is not scaled; float or [M]."""
        row = np.asarray(weights, np.float64)
        tables = [np.tile(row * seconds, (stages, 1)) for seconds in (forward, input_grad, weight_grad, hidden)]
        return cls(*tables, np.broadcast_to(np.asarray(hop, np.float64), row.shape).copy())

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.forward.shape[0]

    @property
    def microbatches(self) -> int:
        """Number of micro-batches."""
        return self.forward.shape[1]

    def reordered(self, order) -> Costs:
        """The costs when micro-batch order[k] runs in the schedule's place k."""
        order = np.asarray(order)
        return Costs(self.forward[:, order], self.input_grad[:, order], self.weight_grad[:, order],
                     self.hidden[:, order], self.hop[order])

    @cached_property
    def key(self) -> tuple:
        """Equal for costs that are equal to the bit."""
        arrays = (self.forward, self.input_grad, self.weight_grad, self.hidden, self.hop)
        return self.forward.shape, *(array.tobytes() for array in arrays)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and self.key == other.key


@dataclass(frozen=True)
class Timeline:
    """When each item of a schedule runs.

    Attributes:
        schedule: what was run.
        start, end: for each rank, float64 seconds by item of its list.
        peak_live: for each rank the most stage activations held at once. One lives from the start of its F to the end
            of its W, or of its B if that is not split.
    """

    schedule: Schedule
    start: tuple[np.ndarray, ...]
    end: tuple[np.ndarray, ...]
    peak_live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first start (0) to the last end."""
        return max((float(end.max()) for end in self.end if len(end)), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(float((end - start).sum()) for start, end in zip(self.start, self.end, strict=True))

    @property
    def bubble(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each rank waits."""
        return tuple(1.0 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time that is spent waiting."""
        return sum(self.bubble) / len(self.bubble)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """`peak_live` in units of one micro-batch's activations of 1/P of the model, the same for all placements."""
        return tuple(live * self.schedule.ranks / self.schedule.stages for live in self.peak_live)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the most stage activations held at once; costs do not matter, since a rank runs its list in order.

    In a pair the backward's activations are still held while the forward makes new ones.
    """
    peaks = []
    for rank in range(schedule.ranks):
        live = peak = 0
        for op in schedule.ops(rank):
            live += {"F": 1, "I": 0, "B": -1, "W": -1}[op.kind]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


@lru_cache(maxsize=256)
def simulator(name: str, ranks: int, microbatches: int, chunks: int) -> Simulator:
    """Of the schedule `name`, or of what stands in for it with so few micro-batches; kept."""
    schedule, _ = fitting(name, ranks, microbatches, chunks)
    return Simulator(schedule)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a checked schedule on paper."""
    return Simulator(schedule).run(costs)


class Simulator:
    """The graph of a schedule's items, ready to be priced.

    Items are numbered by level: all that one depends on have lower levels. The number after the last stands for
    "nothing to wait for", which has ended at 0.

    Raises:
        ValueError: the schedule can never finish, or a forward or backward that another stage needs is missing.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.peak_live = peak_live(schedule)
        items = [(rank, item) for rank, ranks_items in enumerate(schedule.items) for item in ranks_items]
        graph = _Graph(schedule, items)
        levels = graph.levels()
        order = np.argsort(levels, kind="stable")
        self._place = np.empty(len(items) + 1, np.int64)  # number of the item by its place in the lists
        self._place[order], self._place[-1] = np.arange(len(items)), len(items)
        self._previous = self._place[graph.previous][order]
        self._inputs = self._place[graph.inputs][:, order]  # [2, items]
        self._crosses = graph.crosses[:, order].astype(np.float64)
        codes = np.array([_durations(item) for _, item in items], np.int64).reshape(-1, 2, 3)[order]
        self._plane_stage = (codes[..., 0] * schedule.stages + codes[..., 1]).T * schedule.microbatches  # [2, items]
        self._microbatch = codes[..., 2].T
        self._hop_of = graph.hop_of[:, order]
        edges = np.flatnonzero(np.diff(levels[order], prepend=-1, append=len(items)))
        two = self._inputs[1] != len(items)
        self._levels = [(slice(a, b), self._previous[a:b], self._inputs[0, a:b],
                         self._inputs[1, a:b] if two[a:b].any() else None)
                        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]

    def run(self, costs: Costs) -> Timeline:
        """Price one set of costs."""
        start, end = self._walk(costs, np.arange(self.schedule.microbatches)[None])
        start, end = start[self._place[:-1], 0], end[self._place[:-1], 0]
        cuts = np.cumsum([len(items) for items in self.schedule.items])[:-1]
        return Timeline(self.schedule, tuple(np.split(start, cuts)), tuple(np.split(end, cuts)), self.peak_live)

    def makespans(self, costs: Costs, orders: np.ndarray) -> np.ndarray:
        """Makespans for many orders of the micro-batches at once.

        Args:
            orders: int64 [K, M]; micro-batch orders[k, j] runs in the schedule's place j.
        Returns:
            float64 [K].
        """
        return self._walk(costs, orders)[1].max(axis=0)

    def _walk(self, costs: Costs, orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and end, float64 [items + 1, K]."""
        shape = (self.schedule.stages, self.schedule.microbatches)
        if costs.forward.shape != shape:
            raise ValueError(f"costs are for {list(costs.forward.shape)} stages and micro-batches, the schedule has "
                             f"{list(shape)}")
        backward = costs.input_grad + costs.weight_grad
        table = np.stack([costs.forward, backward, costs.input_grad, costs.weight_grad, costs.forward - costs.hidden,
                          backward - costs.hidden, np.zeros(shape)]).ravel()
        columns = np.ascontiguousarray(orders.T)  # [M, K]
        first, second = (table[self._plane_stage[i][:, None] + columns[self._microbatch[i]]] for i in range(2))
        duration = first + second
        hop = [costs.hop[columns[self._hop_of[i]]] * self._crosses[i][:, None] for i in range(2)]
        start, end = np.zeros((2, len(duration) + 1, len(orders)))
        for level, previous, one, two in self._levels:
            ready = np.maximum(end[previous], end[one] + hop[0][level])
            if two is not None:
                ready = np.maximum(ready, end[two] + hop[1][level])
            start[level] = ready
            end[level] = ready + duration[level]
        return start, end


def _durations(item: Item) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The two (plane, stage, micro-batch) of the table whose sum is the item's duration."""
    if isinstance(item, Pair):
        forward, backward = parts(item)
        return ((_F_PAIRED, forward.stage, forward.microbatch), (_B_PAIRED, backward.stage, backward.microbatch))
    return (_PLANE[item.kind], item.stage, item.microbatch), (_NOTHING, 0, 0)


class _Graph:
    """Which items each item waits for, by their place in the lists; `nothing` = number of items.

    Attributes:
        previous: int64 [items + 1], the item before it on its rank.
        inputs: int64 [2, items + 1], the items that make what it needs from neighbouring stages.
        crosses: bool [2, items], whether that input comes from another rank.
        hop_of: int64 [2, items], the micro-batch of that input.
    """

    def __init__(self, schedule: Schedule, items: list[tuple[int, Item]]) -> None:
        self.items = items
        nothing, stages = len(items), schedule.stages
        rank_of = [rank for rank, _ in items]
        made: dict[tuple[bool, int, int], int] = {}  # (forward?, stage, micro-batch) -> item
        for at, (_, item) in enumerate(items):
            for op in parts(item):
                if op.kind != "W":
                    made[op.kind == "F", op.stage, op.microbatch] = at
        self.previous = np.full(nothing, nothing, np.int64)
        self.inputs = np.full((2, nothing), nothing, np.int64)
        self.crosses, self.hop_of = np.zeros((2, nothing), bool), np.zeros((2, nothing), np.int64)
        for at, (rank, item) in enumerate(items):
            if at and rank_of[at - 1] == rank:
                self.previous[at] = at - 1
            for i, op in enumerate(parts(item)):
                source = self._input(op, made, stages)
                if source is not None:
                    self.inputs[i, at], self.hop_of[i, at] = source, op.microbatch
                    self.crosses[i, at] = rank_of[source] != rank

    @staticmethod
    def _input(op: Op, made: dict[tuple[bool, int, int], int], stages: int) -> int | None:
        forward = op.kind == "F"
        stage = op.stage + (-1 if forward else 1)
        if op.kind == "W" or not 0 <= stage < stages:
            return None
        if (forward, stage, op.microbatch) not in made:
            raise ValueError(f"{op} needs the {'forward' if forward else 'backward'} of stage {stage}: it is missing")
        return made[forward, stage, op.microbatch]

    def levels(self) -> np.ndarray:
        """int64 [items]: one more than the highest level that it waits for."""
        nothing = len(self.items)
        waits = [[int(w) for w in column if w != nothing]
                 for column in np.vstack((self.previous, self.inputs)).T]
        takers: list[list[int]] = [[] for _ in range(nothing)]
        for at, sources in enumerate(waits):
            for source in sources:
                takers[source].append(at)
        missing = [len(sources) for sources in waits]
        level, ready = np.zeros(nothing, np.int64), [at for at in range(nothing) if not missing[at]]
        depth = done = 0
        while ready:
            level[ready] = depth
            done += len(ready)
            following = []
            for at in ready:
                for taker in takers[at]:
                    missing[taker] -= 1
                    if not missing[taker]:
                        following.append(taker)
            ready, depth = following, depth + 1
        if done < nothing:
            rank, item = self.items[next(at for at in range(nothing) if missing[at])]
            raise ValueError(f"rank {rank} never comes to {item}: the schedule is cyclic")
        return level
