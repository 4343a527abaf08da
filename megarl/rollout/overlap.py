"""What asynchrony buys: sampling and training on paper, with lengths from real requests. Pure: numpy only.

Engines have so many slots in all; a sample occupies one for its length times the seconds per token (prompts cost
nothing, a token costs the same however many slots are busy). Groups are issued in order as far as `admission.window`
lets them, wait in a queue for slots, and a step takes what `admission.choose` says: the rules of the run itself. The
trainer trains for so many seconds, then publishes: for so long engines stand still and nobody trains.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megarl.rollout.admission import Choice, Pending, choose, window

Rule = Callable[..., Choice]


@dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
        slots: samples that all engines decode together.
        token_s: seconds per token of a sample.
        groups: of a step.
        train_s: seconds of a step's training.
        publish_s: seconds in which weights are swapped.
        max_lag: versions that a token may be behind.
        steps: of the run.
        ahead: steps' groups that may be under way beyond those of the next step; None: max_lag.
    """

    slots: int
    token_s: float
    groups: int
    train_s: float
    publish_s: float
    max_lag: int
    steps: int
    ahead: float | None = None

    def bound(self, lengths_gn: np.ndarray) -> float:
        """Steps per hour that no order of work can beat. A step takes at least as long as each of these:

            every slot busy, but while weights are swapped: tokens * token_s / slots + publish_s
            a trainer that never waits: train_s + publish_s
            freshness: a group issued with version v is taken at the latest by step v + max_lag, so max_lag + 1 steps,
            less the training of the last one, hold the longest sample (or, if that takes longer, the work of a step)

        Args:
            lengths_gn: as for `simulate`; whole steps of them.
        """
        steps_sn = self._by_step(lengths_gn)
        latency = np.maximum(steps_sn.max(1), steps_sn.sum(1) / self.slots).mean()
        return self._rate(steps_sn, float(latency))

    def blind_bound(self, lengths_gn: np.ndarray) -> float:
        """The same of orders that do not know how long a sample will be, and drop none.

        A step's groups are then issued in a random order, and what holds them all is the time that free slots take
        from the first issued to the last done.
        """
        steps_sn = self._by_step(lengths_gn)
        return self._rate(steps_sn, float(np.mean([_makespan(lengths_n, self.slots) for lengths_n in steps_sn])))

    def _by_step(self, lengths_gn: np.ndarray) -> np.ndarray:
        whole = len(lengths_gn) // self.groups * self.groups
        return lengths_gn[:whole].reshape(-1, self.groups * lengths_gn.shape[1])

    def _rate(self, steps_sn: np.ndarray, latency: float) -> float:
        """Steps per hour, if the groups of a step take `latency` tokens' time from being issued to being done."""
        work = float(steps_sn.sum(1).mean()) / self.slots * self.token_s
        fresh = (latency * self.token_s + self.train_s) / (self.max_lag + 1)
        return 3600 / (max(work, self.train_s, fresh) + self.publish_s)


def _makespan(lengths_n: np.ndarray, slots: int) -> int:
    """When the last sample is done if each in turn gets the slot that is free first."""
    free = [0] * slots
    for length in lengths_n.tolist():
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@dataclass
class Overlap:
    """What happened, in seconds from the start; steps and groups count from 0.

    Attributes:
        setting: of the run.
        took: when each step had its groups, float64 [steps].
        ended: when each step's weights were published, float64 [steps].
        taken: numbers of the groups of each step.
        lag: versions between issue and training, by group taken.
        issued: groups issued until each take, int64 [steps].
        dropped: numbers of groups that became too old.
        busy: (time, busy slots) at each change.
        waited: seconds that the trainer waited for groups, by what it waited for.
    """

    setting: Setting
    took: np.ndarray
    ended: np.ndarray
    taken: list[list[int]] = field(default_factory=list)
    lag: dict[int, int] = field(default_factory=dict)
    issued: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    busy: list[tuple[float, int]] = field(default_factory=list)
    waited: dict[str, float] = field(default_factory=dict)

    def steps_per_hour(self, skip: int) -> float:
        """Over steps from `skip` on, when queues have filled, up to as many before the end, when they run dry.

        Steps may be long and short in turn, with a period of max_lag + 1: whole periods are counted.
        """
        period = self.setting.max_lag + 1
        first, last = skip, skip + (len(self.ended) - 1 - 2 * skip) // period * period
        return 3600 * (last - first) / float(self.ended[last] - self.ended[first])


class _Engines:
    """Slots and a queue, on a clock of their own that stands still while weights are swapped."""

    def __init__(self, setting: Setting) -> None:
        self._slots, self._token_s = setting.slots, setting.token_s
        self._queue: deque[tuple[int, int]] = deque()
        self._running: list[tuple[float, int]] = []  # (end on the engines' clock, group)
        self.stood = 0.0

    def put(self, group: int, lengths: np.ndarray) -> None:
        """Queue the samples of a group."""
        self._queue.extend((group, int(length)) for length in lengths)

    def fill(self, now: float) -> int:
        """Give free slots to what waits; returns how many are busy."""
        while self._queue and len(self._running) < self._slots:
            group, length = self._queue.popleft()
            heapq.heappush(self._running, (now - self.stood + length * self._token_s, group))
        return len(self._running)

    def next_end(self) -> float:
        """When the next sample ends; infinity if none runs."""
        return self._running[0][0] + self.stood if self._running else np.inf

    def pop(self) -> int:
        """End that sample; returns its group."""
        return heapq.heappop(self._running)[1]


class _Run:
    """The state of a simulated run."""

    def __init__(self, setting: Setting, lengths_gn: np.ndarray, rule: Rule) -> None:
        self.setting, self.lengths, self.rule = setting, lengths_gn, rule
        self.engines, self.pending = _Engines(setting), {}
        self.left: dict[int, int] = {}  # samples of a group that have not ended
        self.now, self.issued, self.gone, self.finished = 0.0, 0, 0, 0
        self.seen = Overlap(setting, np.zeros(setting.steps), np.zeros(setting.steps))

    def open(self, step: int) -> None:
        """Issue what may be under way with the weights of `step`."""
        one = self.setting
        ahead = one.max_lag if one.ahead is None else one.ahead
        limit = self.gone + window(one.groups, ahead, step, one.steps)
        while self.issued < limit:
            lengths = self.lengths[self.issued % len(self.lengths)]
            self.pending[self.issued] = Pending(self.issued, step, None)
            self.left[self.issued] = len(lengths)
            self.engines.put(self.issued, lengths)
            self.issued += 1
        self._fill()

    def take(self, step: int) -> None:
        """Wait for the step's groups and take them."""
        one, begun = self.setting, self.now
        while True:
            choice = self.rule(self.pending.values(), one.groups, step, one.max_lag)
            if choice.numbers is not None:
                break
            known = self.finished
            while self.finished == known:
                if not np.isfinite(self.engines.next_end()):
                    raise ValueError(f"step {step} waits for {choice.waits_for}, and nothing is under way")
                self._end_one()
            self.seen.waited[choice.waits_for] = self.seen.waited.get(choice.waits_for, 0.0) + self.now - begun
            begun = self.now
        for number in choice.numbers:
            self.seen.lag[number] = step - self.pending.pop(number).issued
        stale = [number for number, group in self.pending.items() if group.issued + one.max_lag <= step]
        for number in stale:  # never, with the rule of the run
            del self.pending[number]
        self.seen.dropped += stale
        self.gone += len(choice.numbers) + len(stale)
        self.seen.taken.append(choice.numbers)
        self.seen.issued.append(self.issued)
        self.seen.took[step] = self.now

    def train(self, step: int) -> None:
        """Train, while engines go on; then publish, while they stand still."""
        until = self.now + self.setting.train_s
        while self.engines.next_end() <= until:
            self._end_one()
        self.engines.stood += self.setting.publish_s
        self.now = until + self.setting.publish_s
        self.seen.ended[step] = self.now

    def _end_one(self) -> None:
        self.now = self.engines.next_end()
        group = self.engines.pop()
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            if group in self.pending:
                self.pending[group] = Pending(group, self.pending[group].issued, self.finished)
            self.finished += 1
        self._fill()

    def _fill(self) -> None:
        self.seen.busy.append((self.now, self.engines.fill(self.now)))


def simulate(setting: Setting, lengths_gn: np.ndarray, rule: Rule = choose) -> Overlap:
    """Run it.

    Args:
        setting: what runs.
        lengths_gn: tokens of each sample of each group, [groups, samples of a group]; used from the front again if the
            run is longer.
        rule: what a step takes: `admission.choose` or another of its signature. Groups that it lets become too old are
            dropped.
    """
    run = _Run(setting, lengths_gn, rule)
    for step in range(setting.steps):
        run.open(step)
        run.take(step)
        run.train(step)
    return run.seen


def ks_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two samples: the largest difference of their distribution functions."""
    values = np.union1d(one, other)
    share = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (one, other)]
    return float(np.abs(share[0] - share[1]).max())
