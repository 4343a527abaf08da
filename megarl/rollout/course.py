"""A trainer's part in the sampling that goes on beside the training: opening steps, hearing what comes next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from megarl.cluster.store import Meeting
from megarl.data.sample import Group
from megarl.rollout.dispatch import Decision, Dispatcher, Snapshot, wait_for_decision, wait_for_snapshot
from megarl.rollout.generate import Generator
from megarl.rollout.ledger import Announcements
from megarl.sync.background import in_thread

OPEN_POLL_S = 0.005

T = TypeVar("T")


@dataclass
class Course:
    """Every trainer has one, and makes the same calls.

    Attributes:
        ear: what trainer 0 announces.
        catch_up: gives the present weights to engines that came up; collective over the trainers.
        dispatcher: on trainer 0.
        generator: on leaders.
        beat: called again and again while it waits.
        opening: on trainer 0: the thread that opens a step once its weights have arrived.
    """

    ear: Announcements
    catch_up: Callable[[], object]
    dispatcher: Dispatcher | None
    generator: Generator | None
    beat: Callable[[], None]
    opening: threading.Thread | None = field(default=None, init=False)

    def open(self, step: int, version: str, when: Callable[[], bool] = lambda: True) -> None:
        """Let `step` be sampled by the weights `version` as soon as `when()`: then the engines have them.

        How many groups may be under way is settled now, before any group of `step` is taken.
        """
        if self.dispatcher is None:
            return
        self._opened()
        limit = self.dispatcher.limit(step)

        def wait() -> None:
            while not when():
                time.sleep(OPEN_POLL_S)
            self.dispatcher.open(step, version, limit)

        self.opening = threading.Thread(target=wait, name="open a step", daemon=True)
        self.opening.start()
        if when():
            self._opened()

    def hold(self) -> None:
        """Let what is under way end, and nothing begin, until `open`."""
        if self.dispatcher is not None:
            self._opened()
        while True:
            if self.dispatcher is not None:
                self.dispatcher.hold(self._alive)
            if not wait_for_decision(self.ear, self._alive).joins:
                return
            self.catch_up()

    def attend(self, work: Callable[[], T] | None, meet: Meeting) -> T | None:
        """Do this trainer's part of something long, in a thread; return its result once all have done theirs.

        Meanwhile engines that come up get the present weights: whoever samples may be waiting for one.

        Raises:
            whatever `work` does.
        """
        pending, arrived = in_thread(work or (lambda: None), "attend"), False

        def alive() -> None:
            nonlocal arrived
            self._alive()
            if pending.done() and not arrived:
                pending.result()
                meet.arrive()
                arrived = True

        while True:
            if self.dispatcher is not None:
                self.dispatcher.attend(lambda: arrived and meet.complete(), alive)
            if not wait_for_decision(self.ear, alive).joins:
                return pending.result()
            self.catch_up()

    def decide(self, step: int) -> Decision:
        """What all trainers do for `step`: take groups, or stop."""
        while True:
            if self.dispatcher is not None:
                self.dispatcher.decide(step, self._alive)
            decision = wait_for_decision(self.ear, self._alive)
            if not decision.joins:
                return decision
            self.catch_up()

    def snapshot(self) -> tuple[Snapshot, dict[int, Group]]:
        """Where the sampling stands, and of its finished groups those that this leader has, by their places there."""
        if self.dispatcher is not None:
            self.dispatcher.snapshot()
        found = wait_for_snapshot(self.ear, self._alive)
        return found, self.generator.held(found.numbers) if self.generator is not None else {}

    def _alive(self) -> None:
        self.beat()
        if self.generator is not None:
            self.generator.check()

    def _opened(self) -> None:
        """Wait until the step that was opened last is."""
        if self.opening is not None:
            self.opening.join()
