"""A supervisor's talk with the control store, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed import DistError

from megarl.rollout.balance import Load
from megarl.rollout.fleet import EngineRecord, Registrar
from megarl.rollout.lease import BEAT_S, LeaseWatch


class Link(threading.Thread):
    """Beats, reads and writes: a store that hangs must not keep the supervisor from acting.

    Args:
        registrar: of this supervisor; used by the thread alone once that runs.
        engines: those that this supervisor has registered.
        peers: the other rollout ranks that have parts of its engine.
        part_of: the engine of another rank that this rank has a part of, or "".

    Attributes:
        trainers: watch of the trainers' lease.
        trainers_seen: whether it has ever moved.
        stop_reason: why the trainers asked to stop, or None.
        condemned: engine id -> (incarnation, why).
        peers: rank -> watch of its lease; only of those that have begun.
        ended: rank -> (incarnation, why, status) of its part that ended last.
        launch: (incarnation, meeting) that this rank's part is to be.
        failure: what ended the talk, or None.
    """

    def __init__(self, registrar: Registrar, engines: Sequence[str], peers: Sequence[int] = (),
                 part_of: str = "") -> None:
        super().__init__(name="control store", daemon=True)
        self.trainers, self.trainers_seen = LeaseWatch(), False
        self.stop_reason: str | None = None
        self.condemned = dict.fromkeys(engines, (0, ""))
        self.peers: dict[int, LeaseWatch] = {}
        self.ended = dict.fromkeys(peers, (0, "", 0))
        self.launch = (0, "")
        self.failure: DistError | None = None
        self._registrar, self._part_of = registrar, part_of
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def write(self, record: EngineRecord) -> None:
        """Have the record written soon, after what was given before."""
        self._outbox.put(partial(self._registrar.write, record))

    def write_load(self, record: EngineRecord, load: Load) -> None:
        """Have the engine's load written soon."""
        self._outbox.put(partial(self._registrar.write_load, record, load))

    def announce(self, engine: str, incarnation: int, meeting: str) -> None:
        """Have the other ranks start their parts of this incarnation soon, or end them if `meeting` is ""."""
        self._outbox.put(partial(self._registrar.announce, engine, incarnation, meeting))

    def note_join(self, incarnation: int) -> None:
        """Have it noted soon that this rank's part was started."""
        self._outbox.put(partial(self._registrar.join, self._part_of, incarnation))

    def end_part(self, incarnation: int, why: str, status: int) -> None:
        """Have the end of this rank's part told soon."""
        self._outbox.put(partial(self._registrar.end_part, self._part_of, incarnation, why, status))

    def close(self, timeout_s: float) -> None:
        """Write what is left and end; gives up after `timeout_s`."""
        self._outbox.put(None)
        self.join(timeout_s)

    def run(self) -> None:
        """Until closed or the store fails."""
        try:
            while True:
                self._registrar.beat()
                self._look()
                if not self._write_outbox(BEAT_S / 4):
                    return
        except DistError as error:
            self.failure = error

    def _look(self) -> None:
        beats = self._registrar.trainers_beat()
        self.trainers.observe(beats)
        self.trainers_seen |= beats > 0
        self.stop_reason = self._registrar.stop_reason()
        for engine in self.condemned:
            self.condemned[engine] = self._registrar.condemned(engine)
        for rank, lease in zip(self.ended, self._registrar.peers(list(self.ended)), strict=True):
            if lease:
                self.peers.setdefault(rank, LeaseWatch()).observe(lease)
        for rank in self.ended:
            self.ended[rank] = self._registrar.ended_part(next(iter(self.condemned)), rank)
        if self._part_of:
            self.launch = self._registrar.launch(self._part_of)

    def _write_outbox(self, wait_s: float) -> bool:
        """Write what comes within `wait_s`; False once closed."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                write = self._outbox.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return True
            if write is None:
                return False
            write()
