"""The trainers as they bring an update to sets of engines: phases that all of them begin, end and judge together."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.errors import MachineFault, UserMistake
from megarl.rollout.client import EngineClient, EngineTimeout, open_session
from megarl.rollout.fleet import EngineRecord
from megarl.rollout.protocol import EngineError
from megarl.sync.background import EventLoop, all_well
from megarl.sync.sets import EngineSet

ASK_S = 10.0  # for an answer that needs no work

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
    Attributes:
        loop: where calls to engines run; on sources only.
        is_zero: whether this is trainer 0.
    """

    def __init__(self, is_source: bool, timeout_s: float, call_timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._speaks, self.is_zero = is_source, dist.get_rank() == 0
        self.call_timeout_s = call_timeout_s
        if is_source:
            self.loop = EventLoop("megarl publish")
            self._session = self.loop.run(_open())

    def client(self, engine: EngineRecord) -> EngineClient:
        """Of an engine; on sources only."""
        return EngineClient(engine.url, self._session, control_timeout_s=self.call_timeout_s, retries=1,
                            keys=engine.keys)

    def muster(self) -> None:
        """Return when all trainers are here.

        Raises:
            RuntimeError: on trainer 0, with the ranks that did not come in time (gloo's monitored barrier).
        """
        dist.monitored_barrier(self._group, wait_all_ranks=True)

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


async def _open() -> Any:
    return open_session()
