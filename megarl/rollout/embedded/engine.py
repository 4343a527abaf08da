"""The engine's thread: decodes while there is something to decode and does what it is told in between."""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from megarl.errors import EXIT_BUG
from megarl.rollout.embedded.requests import Group, Sequence
from megarl.rollout.embedded.scheduler import Scheduler
from megarl.rollout.embedded.updates import UpdateRefused, WeightUpdater

PAUSE_MODES = ("abort", "retract", "in_place")


class Engine:
    """Owns scheduler and weights on a thread of its own; every public method may be called from any thread.

    Each returns a future that is resolved on the engine's thread, between two decode steps.
    """

    def __init__(self, scheduler: Scheduler, updater: WeightUpdater) -> None:
        self._scheduler, self._updater = scheduler, updater
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def generate(self, groups: list[Group]) -> Future:
        """Resolved with None when all samples of all groups are finished."""
        done = _future()
        left = [len(groups)]

        def count(_: Group) -> None:
            left[0] -= 1
            if not left[0]:
                done.set_result(None)

        def submit() -> None:
            for group in groups:
                group.on_done = count
                self._scheduler.submit(group)

        self._call(submit)
        return done

    def abort(self, wanted: Callable[[Sequence], bool]) -> Future:
        """Finish the wanted sequences."""
        return self._call(lambda: self._scheduler.abort(wanted))

    def pause(self, mode: str) -> Future:
        """Stop generating; requests wait until `resume`.

        Args:
            mode: abort ends running and waiting requests; retract puts running ones back into the queue, without
                their keys and values; in_place leaves all where it is.
        """
        def pause() -> None:
            self._paused = True
            if mode == "abort":
                self._scheduler.abort(lambda _: True)
            elif mode == "retract":
                self._scheduler.retract()
        return self._call(pause)

    def resume(self) -> Future:
        """Generate again."""
        def resume() -> None:
            self._paused = False
        return self._call(resume)

    def flush(self) -> Future:
        """Drop cached keys and values; False if sequences are in slots, then nothing is dropped."""
        return self._call(self._scheduler.flush)

    def set_version(self, version: str, abort_all: bool) -> Future:
        """Name the weights from here on."""
        def name() -> None:
            if abort_all:
                self._scheduler.abort(lambda _: True)
            self._scheduler.set_version(version)
        return self._call(name)

    def update(self, change: Callable[[WeightUpdater], None], *, flush: bool = False, abort_all: bool = False,
               version: str | None = None) -> Future:
        """Run a change of the weights.

        The future raises UpdateRefused if the change does, or if `flush` was asked for while sequences are in slots;
        in the second case the change is done and stays, as in SGLang.
        """
        def update() -> None:
            if abort_all:
                self._scheduler.abort(lambda _: True)
            try:
                change(self._updater)
            finally:
                self._scheduler.forget()
            if flush and not self._scheduler.flush():
                raise UpdateRefused("The weights were changed, but the cache was not flushed: requests are running.")
            if version is not None:
                self._scheduler.set_version(version)
        return self._call(update)

    def read(self, function: Callable[[], Any]) -> Future:
        """Call a function between two steps."""
        return self._call(function)

    def state(self) -> dict[str, Any]:
        """A glance from outside, for /model_info; not synchronised with the thread."""
        scheduler, updater = self._scheduler, self._updater
        return {"weight_version": scheduler.version, "paused": self._paused, "update_open": updater.open,
                "weights_whole": not updater.torn, "running": scheduler.running, "waiting": scheduler.waiting,
                "prefilled_tokens": scheduler.prefilled_tokens, "generated_tokens": scheduler.generated_tokens}

    def _call(self, function: Callable[[], Any]) -> Future:
        future = _future()
        with self._wake:
            self._commands.append((function, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                busy = not self._paused and self._updater.serving and self._scheduler.step()
                if not busy:
                    with self._wake:
                        self._wake.wait_for(lambda: self._commands)
        except BaseException:  # a thread that ends silently would leave every request waiting
            traceback.print_exc()
            os._exit(EXIT_BUG)

    def _obey(self) -> None:
        """Run the commands that have come, in order."""
        while self._commands:
            function, future = self._commands.popleft()
            try:
                result = function()
            except UpdateRefused as refused:
                future.set_exception(refused)
            else:
                future.set_result(result)


def _future() -> Future:
    """A future that whoever waits for it cannot cancel: what was asked happens."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
