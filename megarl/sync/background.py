"""Work beside the main thread: an event loop for HTTP, and threads for calls that may block for long.

All threads are daemons: a call that hangs until its timeout does not keep a failed process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.cluster import device
from megarl.errors import MachineFault
from megarl.rollout.protocol import EngineError

GRACE_S = 3.0

T = TypeVar("T")


class EventLoop:
    """An asyncio event loop in a thread of its own, on the device of the thread that made it."""

    def __init__(self, name: str) -> None:
        self._loop, here = asyncio.new_event_loop(), device.current()

        def run() -> None:
            device.use(here)
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there; the caller goes on."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for its result or exception."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Stop the loop; what still runs in it is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run `call` in a thread of its own, on this thread's device."""
    future: Future[T] = Future()
    here = device.current()
    future.set_running_or_notify_cancel()  # whoever waits may give up; the call goes on

    def run() -> None:
        try:
            device.use(here)
            future.set_result(call())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def all_well(awaitables: Sequence[Awaitable[Any]], what: str, grace_s: float = GRACE_S) -> None:
    """Wait for all of them; if one fails, `grace_s` longer for the rest, which is then cancelled.

    One fault often shows in several places (a dead engine breaks everyone's transfer): the time of grace is for the
    failure that names its cause.

    Raises:
        MachineFault: what failed; the engines' errors, or others if no engine has one.
    """
    if not awaitables:
        return
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if pending:
        _, pending = await asyncio.wait(pending, timeout=grace_s)
    for task in pending:
        task.cancel()
    failures = [error for task in tasks if task not in pending and (error := task.exception())]
    if failures:
        named = [error for error in failures if isinstance(error, EngineError)] or failures
        reasons = "; ".join(str(error).splitlines()[0] for error in named)
        raise MachineFault(f"could not {what}: {reasons}") from named[0]
