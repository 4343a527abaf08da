"""The trainers as they bring an update to sets of engines: phases that all of them begin, end and judge together."""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megarl.errors import MachineFault, UserMistake
from megarl.rollout.client import EngineClient, EngineTimeout, open_session
from megarl.rollout.fleet import EngineRecord
from megarl.rollout.protocol import EngineError
from megarl.sync.background import EventLoop, all_well, in_thread
from megarl.sync.sets import EngineSet

ASK_S = 10.0  # for an answer that needs no work
TOLD_S = 5.0  # for what trainer 0 found at a muster to be seen by the others

T = TypeVar("T")


class Targets:
    """The sets that an update goes to; the same on every trainer.

    Attributes:
        all: every one of them.
        failed: set number -> why it takes no further part.
        held: engine's key -> name of the weights that it held before.
    """

    def __init__(self, sets: Sequence[EngineSet], held: Mapping[tuple[str, int], str]) -> None:
        self.all, self.held = tuple(sets), held
        self.failed: dict[int, str] = {}

    @property
    def sets(self) -> list[EngineSet]:
        """Those that still take part."""
        return [one for one in self.all if one.number not in self.failed]

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        """Of the sets that still take part."""
        return tuple(engine for one in self.sets for engine in one.engines)

    @property
    def lost(self) -> dict[EngineRecord, str]:
        """Engines of the other sets, with the reason."""
        return {engine: self.failed[one.number] for one in self.all if one.number in self.failed
                for engine in one.engines}


class Crew:
    """All trainers, over a group of their own: an update may run in a thread beside the training's collectives.

    Making it is collective over the trainers.

    Args:
        is_source: whether this trainer sends weights; trainer 0 does.
        timeout_s: of every collective: a trainer waits here for as long as another one sends.
        call_timeout_s: of calls to engines.
        muster_timeout_s: within which all trainers come to a muster.
    Attributes:
        loop: where calls to engines run; on sources only.
        is_zero: whether this is trainer 0.
    """

    def __init__(self, is_source: bool, timeout_s: float, call_timeout_s: float, muster_timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._speaks, self.is_zero = is_source, dist.get_rank() == 0
        self.call_timeout_s, self._muster_timeout_s, self._musters = call_timeout_s, muster_timeout_s, 0
        # for what trainer 0 finds: gloo closes all connections of a rank for which one operation took too long
        self._board = dist.PrefixStore(f"muster/{self._group.group_name}", dist.distributed_c10d._get_default_store())
        if is_source:
            self.loop = EventLoop("megarl publish")
            self._session = self.loop.run(_open())

    def client(self, engine: EngineRecord) -> EngineClient:
        """Of an engine; on sources only."""
        return EngineClient(engine.url, self._session, control_timeout_s=self.call_timeout_s, retries=1,
                            keys=engine.keys)

    def muster(self) -> None:
        """Return when all trainers are here.

        `dist.monitored_barrier` would not do: it has trainer 0 alone name who is missing, and the others may end first,
        with nothing to tell.

        Raises:
            MachineFault: on every trainer, naming those that are gone or did not come within the timeout after
                trainer 0; or trainer 0, if it is gone or did not come within the timeout after this one.
        """
        self._musters += 1
        missing = self._call() if self.is_zero else self._answer()
        if missing:
            raise MachineFault(f"the trainers did not meet to publish weights: {missing}")

    def _call(self) -> str:
        """Trainer 0's part of a muster: say that it is here, wait for the others, tell them; who is missing, or ""."""
        others, deadline = range(1, dist.get_world_size()), time.monotonic() + self._muster_timeout_s
        words = [self._post(dist.isend, _word(0), rank) for rank in others]
        here = [self._post(dist.irecv, _word(0), rank) for rank in others]
        gone, late = [], []
        for rank, work in zip(others, here, strict=True):
            if not _ends(work, deadline):
                (gone if time.monotonic() < deadline else late).append(rank)
        missing = "; ".join(filter(None, [_named(gone, "gone"), _named(late, "late", self._muster_timeout_s)]))
        if missing:
            _briefly(lambda: self._board.set(str(self._musters), missing), None)
        words += [self._post(dist.isend, _word(len(missing)), rank) for rank in others if rank not in gone + late]
        deadline = time.monotonic() + (TOLD_S if missing else self._muster_timeout_s)
        for work in words:
            _ends(work, deadline)  # a trainer that is lost only now fails what comes next
        return missing

    def _answer(self) -> str:
        """The other trainers' part."""
        deadline = time.monotonic() + self._muster_timeout_s
        word = self._post(dist.isend, _word(0), 0)
        if _ends(self._post(dist.irecv, _word(0), 0), deadline):
            deadline, verdict = time.monotonic() + self._muster_timeout_s + TOLD_S, _word(0)
            if _ends(self._post(dist.irecv, verdict, 0), deadline) and _ends(word, deadline) and not verdict:
                return ""
        elif time.monotonic() >= deadline:
            return _named([0], "late", self._muster_timeout_s)
        return _briefly(self._read, "") or _named([0], "gone")

    def _read(self) -> str:
        """What trainer 0 has found missing, "" if it has not said so in time."""
        key, until = str(self._musters), time.monotonic() + TOLD_S
        while not self._board.check([key]):
            if time.monotonic() > until:
                return ""
            time.sleep(0.05)
        return self._board.get(key).decode()

    def _post(self, start: Callable[..., dist.Work], word: torch.Tensor, rank: int) -> dist.Work | None:
        """Begin to send or receive; None if there is no connection any more."""
        try:
            return start(word, rank, self._group)
        except RuntimeError:
            return None

    def together(self, work: Callable[[], T]) -> T:
        """Do this rank's part of a phase; return when all trainers have done theirs, raise if one of them failed."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        mistake = isinstance(failure, UserMistake)  # as such on all trainers: nobody may retry it
        reasons = self._reasons({int(mistake): str(failure) or repr(failure)} if failure else {})
        if reasons:
            raise failure or (UserMistake(reasons[1]) if 1 in reasons else MachineFault(reasons[0]))
        return result

    def per_set(self, targets: Targets, work: Callable[[dict[int, str]], T]) -> T:
        """As `together`; `work` notes in its argument which sets failed and why: they take no further part."""
        failed: dict[int, str] = {}
        result = self.together(lambda: work(failed))
        for number, reason in self._reasons(failed).items():
            targets.failed.setdefault(number, reason)
        return result

    def _reasons(self, mine: dict[int, str]) -> dict[int, str]:
        """What any trainer notes under a number, on all trainers; costs little if nobody notes anything."""
        failed = torch.tensor([len(mine)], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if not failed:
            return {}
        notes = self.gathered(mine)
        return {number: "; ".join(dict.fromkeys(note[number] for note in notes if number in note))
                for number in sorted({number for note in notes for number in note})}

    def tell(self, targets: Targets, call: Callable[[EngineClient], Coroutine[Any, Any, Any]], what: str) -> None:
        """Trainer 0 makes this call to every engine at once; a set in which one fails takes no further part."""
        async def one_set(one: EngineSet) -> str | None:
            try:
                await all_well([call(self.client(engine)) for engine in one.engines], f"have all engines {what}")
            except MachineFault as error:
                return str(error)

        async def every_set() -> list[str | None]:
            return await asyncio.gather(*map(one_set, targets.sets))

        def work(failed: dict[int, str]) -> None:
            if self.is_zero:
                failed.update({one.number: reason for one, reason in
                               zip(targets.sets, self.loop.run(every_set()), strict=True) if reason})

        self.per_set(targets, work)

    def ask(self, engines: Sequence[EngineRecord], call: Callable[[EngineClient], Coroutine[Any, Any, T]],
            wait_s: float = ASK_S) -> list[T | EngineError]:
        """Trainer 0 alone: every engine's answer, or its failure."""
        async def one(engine: EngineRecord) -> T | EngineError:
            try:
                return await asyncio.wait_for(call(self.client(engine)), wait_s)
            except EngineError as error:
                return error
            except TimeoutError:
                return EngineTimeout(f"{engine.url}/: no answer within {wait_s:g} s")

        async def every() -> list[T | EngineError]:
            return await asyncio.gather(*map(one, engines))

        return self.loop.run(every())

    def from_zero(self, value: T) -> T:
        """Trainer 0's value, on all trainers."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """Every trainer's value, on all trainers."""
        found: list[T] = [value] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found

    def sum(self, *values: int) -> list[int]:
        """Each value summed over the trainers."""
        totals = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(totals, group=self._group)
        return totals.tolist()

    def close(self) -> None:
        """Stop speaking to engines."""
        if self._speaks:
            self.loop.run(self._session.close())
            self.loop.close()


def _word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def _ends(work: dist.Work | None, deadline: float) -> bool:
    """Wait for it until then; whether it has ended well."""
    try:
        # 0 would be no timeout at all
        return work is not None and work.wait(datetime.timedelta(
            milliseconds=max(1, math.ceil(1000 * (deadline - time.monotonic())))))
    except RuntimeError:
        return False


def _briefly(call: Callable[[], T], otherwise: T) -> T:
    """The result of a call to the store, which may be lost with its host, or hang."""
    try:
        return in_thread(call, "muster").result(2 * TOLD_S)
    except (RuntimeError, TimeoutError):
        return otherwise


def _named(ranks: Sequence[int], how: Literal["gone", "late"], timeout_s: float = 0.0) -> str:
    """What to tell of trainers that are missing, "" if there are none."""
    if not ranks:
        return ""
    who = f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if how == "gone":
        return f"{who} {'are' if len(ranks) > 1 else 'is'} gone"
    return f"{who} did not come within {timeout_s:g} s (cluster.timeout_s)"


async def _open() -> Any:
    return open_session()
