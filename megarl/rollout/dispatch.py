"""What trainer 0 does for the sampling: opens steps, follows the leaders' log, says what a step takes.

The groups of a step are chosen by a pure function (`admission.choose`) from what the log says; all trainers hear the
choice through the control store, so they agree on it however long they waited.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from megarl.config.rollout import CLOSE_S
from megarl.config.schema import Config
from megarl.errors import MachineFault
from megarl.rollout.admission import Pending, choose, window
from megarl.rollout.lease import LeaseWatch
from megarl.rollout.ledger import Announcements, Book, Entry

POLL_LEAST_S, POLL_MOST_S = 0.002, 0.25
ASK_S = 1.0


@dataclass(frozen=True)
class Draws:
    """From numbers of draws to positions of prompts: first those that an earlier life left over, then on from a place.

    Attributes:
        unfinished: positions that were drawn and never trained on, ascending.
        position: where the data goes on.
    """

    unfinished: tuple[int, ...] = ()
    position: int = 0

    def at(self, number: int) -> int:
        """The position of the prompt of a draw."""
        left = len(self.unfinished)
        return self.unfinished[number] if number < left else self.position + number - left


@dataclass(frozen=True)
class Decision:
    """What all trainers do next.

    Attributes:
        joins: publish the present weights to engines that came up; then there is another decision. The rest is unset.
        stops: end the run for now. The rest is unset.
        saves: write a checkpoint after the step.
        numbers: of the groups to train on.
        unfinished, position: draws of a life that would begin after this step.
        dropped: groups given up since the last take.
        ahead: groups that are under way or wait beyond those taken.
        waited_s: seconds that the step waited for groups, by what it waited for.
    """

    joins: bool = False
    stops: bool = False
    saves: bool = False
    numbers: Sequence[int] = ()
    unfinished: Sequence[int] = ()
    position: int = 0
    dropped: int = 0
    ahead: int = 0
    waited_s: dict[str, float] | None = None


@dataclass(frozen=True)
class Snapshot:
    """Where the sampling stands, for a checkpoint.

    Attributes:
        numbers: of the groups that have finished and were not taken, in the order in which they finished.
        issued: of each the number of the newest weights when it was issued.
        unfinished, position: draws of a life that begins with these groups.
    """

    numbers: Sequence[int] = ()
    issued: Sequence[int] = ()
    unfinished: Sequence[int] = ()
    position: int = 0


class Dispatcher:
    """Trainer 0's.

    Args:
        config: the run's.
        store: the control store of this life of the job.
        draws: where the data begins in this life.
        held: `Snapshot.issued` of the groups that an earlier life had finished. Their numbers are those below 0.
        joined: whether an engine is up that lacks the present weights.
        stops: whether somebody asks the run to end.
        saves: whether a checkpoint is due.
    """

    def __init__(self, config: Config, store: Store, draws: Draws, held: Sequence[int] = (), *,
                 joined: Callable[[], bool] = lambda: False, stops: Callable[[], bool] = lambda: False,
                 saves: Callable[[], bool] = lambda: False) -> None:
        rollout = config.rollout
        self._need, self._steps, self._lag = config.data.prompts_per_step, config.run.steps, rollout.max_lag
        self._ahead = rollout.max_lag if rollout.ahead is None else rollout.ahead
        self._draws, self._joined, self._stops, self._saves = draws, joined, stops, saves
        self._asked_at, self._opened = float("-inf"), -1
        self._silence_s = silence_s(config)
        self._book, self._opener = Book(store), Book(store)
        self._pending = {number: Pending(number, issued, finished) for finished, (number, issued) in
                         enumerate(zip(held_numbers(len(held)), held, strict=True), start=-len(held))}
        self._unissued: set[int] = set()  # numbers below some issued one: another leader has drawn them
        self._issued = self._gone = self._finished = self._dropped = 0
        self._watch = LeaseWatch()

    def limit(self, step: int) -> int:
        """Numbers below may be issued while `step` is the next to train; asked before any of its groups is taken."""
        self._read()
        return self._gone + window(self._need, self._ahead, step, self._steps) - self._held()

    def open(self, step: int, version: str, limit: int | None = None) -> None:
        """Let `step`, the next to train, and what may be ahead of it be sampled by the weights `version`.

        With a `limit` it may be called from another thread.
        """
        limit = self.limit(step) if limit is None else limit
        self._opener.set_version(version, step)
        self._opener.set_limit(limit)
        self._opened = step

    def hold(self, alive: Callable[[], None]) -> None:
        """Let nothing more be issued until `open`, and announce when nothing is under way any more (an empty Decision).

        It may announce first, as `decide` does, that engines want the present weights. `alive` as in `decide`.
        """
        self._book.set_limit(0)
        self._watch.observe(-1)
        self._read()
        while any(one.finished is None for one in self._pending.values()):
            if self._due() and self._joined():
                return self._book.announce(asdict(Decision(joins=True)))
            self._rest(alive)
        self._book.announce(asdict(Decision()))

    def attend(self, over: Callable[[], bool], alive: Callable[[], None]) -> None:
        """Announce as soon as it is `over` (an empty Decision), or before that, that engines want the present weights.

        `alive` as in `decide`.
        """
        begun = time.monotonic()
        while not over():
            if self._due() and self._joined():
                return self._book.announce(asdict(Decision(joins=True)))
            alive()
            time.sleep(min(max((time.monotonic() - begun) / 50, POLL_LEAST_S), POLL_MOST_S))
        self._book.announce(asdict(Decision()))

    def decide(self, step: int, alive: Callable[[], None]) -> None:
        """Announce what the trainers do next for `step`, as soon as that can be said.

        Args:
            step: the next to train; `open` may be called for it meanwhile.
            alive: called again and again; raises what ends the run.
        Raises:
            MachineFault: nothing has happened to the groups under way for longer than one of them can take.
        """
        waited: Counter[str] = Counter()
        self._watch.observe(-1)
        news = True
        while True:
            if request := self._request():
                return self._book.announce(asdict(request))
            if news:
                closed = self._opened == step and self._gone + len(self._pending) - self._held() >= self._book.limit
                choice = choose(self._pending.values(), self._need, step, self._lag, closed=closed)
            if choice.numbers is not None:
                return self._take(choice.numbers, waited)
            begun = time.monotonic()
            news = self._rest(alive)
            waited[choice.waits_for] += time.monotonic() - begun

    def snapshot(self) -> None:
        """Announce a Snapshot."""
        self._read()
        done = sorted((one for one in self._pending.values() if one.finished is not None), key=lambda one: one.finished)
        under_way = [number for number, one in self._pending.items() if one.finished is None]
        self._book.announce(asdict(Snapshot([one.number for one in done], [one.issued for one in done],
                                            *self._left_over(under_way))))

    def _held(self) -> int:
        """Groups of an earlier life that were not taken yet: they were drawn then."""
        return sum(number < 0 for number in self._pending)

    def _left_over(self, numbers: Iterable[int]) -> tuple[list[int], int]:
        """(unfinished, position) of draws of which these numbers and those not issued are still to be answered."""
        begun = [self._draws.at(number) for number in (*numbers, *self._unissued)]
        rest = self._draws.unfinished[self._issued:]
        return sorted((*begun, *rest)), self._draws.at(max(self._issued, len(self._draws.unfinished)))

    def _request(self) -> Decision | None:
        """What comes before a take."""
        if not self._due():
            return None
        return Decision(stops=True) if self._stops() else Decision(joins=True) if self._joined() else None

    def _due(self) -> bool:
        """Whether it is time to ask what else there is to do: once a second."""
        if time.monotonic() - self._asked_at < ASK_S:
            return False
        self._asked_at = time.monotonic()
        return True

    def _take(self, numbers: list[int], waited: Counter[str]) -> None:
        for number in numbers:
            del self._pending[number]
        self._gone += sum(number >= 0 for number in numbers)
        unfinished, position = self._left_over(number for number in self._pending if number >= 0)
        self._book.announce(asdict(Decision(
            saves=self._saves(), numbers=numbers, unfinished=unfinished, position=position,
            dropped=self._dropped, ahead=len(self._pending), waited_s=dict(waited))))
        self._dropped = 0

    def _rest(self, alive: Callable[[], None]) -> bool:
        """Wait a moment; whether anything was logged meanwhile."""
        alive()
        quiet = self._watch.observe(self._book.read)
        open_ = sum(one.finished is None for one in self._pending.values()) + len(self._unissued)
        if quiet > self._silence_s and open_:
            raise MachineFault(f"{open_} groups are with leaders that have finished none for {self._silence_s:.0f} s")
        time.sleep(min(max(quiet / 50, POLL_LEAST_S), POLL_MOST_S))
        return self._read()

    def _read(self) -> bool:
        entries = self._book.entries()
        for entry in entries:
            self._enter(entry)
        return bool(entries)

    def _enter(self, entry: Entry) -> None:
        if entry.state == "issued":
            self._unissued |= set(range(self._issued, entry.number))
            self._issued = max(self._issued, entry.number + 1)
            self._unissued.discard(entry.number)
            self._pending[entry.number] = Pending(entry.number, entry.version, None)
        elif entry.state == "kept":
            self._finished += 1
            self._pending[entry.number] = Pending(entry.number, self._pending[entry.number].issued, self._finished)
        else:
            del self._pending[entry.number]
            self._gone += 1
            self._dropped += entry.state == "dropped"


def held_numbers(count: int) -> range:
    """Numbers of the groups of an earlier life, in the order in which they finished: below those of any draw."""
    return range(-count, 0)


def wait_for_decision(ear: Announcements, alive: Callable[[], None]) -> Decision:
    """What trainer 0 says next, heard by any trainer; `alive` is called again and again, and raises what ends it."""
    return Decision(**_heard(ear, alive))


def wait_for_snapshot(ear: Announcements, alive: Callable[[], None]) -> Snapshot:
    """The same for a snapshot."""
    return Snapshot(**_heard(ear, alive))


def _heard(ear: Announcements, alive: Callable[[], None]) -> dict[str, Any]:
    begun = time.monotonic()
    while (message := ear.next()) is None:
        alive()
        time.sleep(min(max((time.monotonic() - begun) / 50, POLL_LEAST_S), POLL_MOST_S))
    return message


def silence_s(config: Config) -> float:
    """The longest that the groups under way can be without news, with room for their scoring."""
    rollout = config.rollout
    request = (rollout.retries + 1) * (rollout.request_timeout_s + rollout.no_engine_timeout_s)
    episode = max(((one.retries + 1) * (one.timeout_s + CLOSE_S) for one in config.environments), default=0.0)
    return max(request, episode) + config.cluster.timeout_s
