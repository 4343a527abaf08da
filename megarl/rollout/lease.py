"""Signs of life through the control store: counters that their owner moves and others watch on their own clocks.

No timestamps travel, so clocks of different hosts need not agree.
"""

from __future__ import annotations

import threading
import time

from torch.distributed import Store

BEAT_S = 1.0


class Heartbeat:
    """Moves a counter once a second from a thread, until closed. A context manager.

    Args:
        store: control store; the thread uses a connection of its own. If it fails, the thread's traceback is printed
            and the counter stands still.
        key: the counter.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store.clone(), key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat {key}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._store.add(self._key, 1)
            self._ended.wait(BEAT_S)

    def close(self) -> None:
        """Stop beating; others will notice after their timeout."""
        self._ended.set()
        self._thread.join(timeout=BEAT_S)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LeaseWatch:
    """How long a counter has stood still, on this observer's clock."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._moved_at = time.monotonic()

    def observe(self, value: int) -> float:
        """Take a reading; seconds since the last one that differed (a first reading starts the clock)."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._moved_at = value, now
        return now - self._moved_at

    @property
    def quiet_s(self) -> float:
        """Seconds since the counter was last seen to move, or since this watch was made."""
        return time.monotonic() - self._moved_at


def read_counter(store: Store, key: str) -> int:
    """The counter's value, 0 if nobody has moved it; never blocks on a missing key."""
    return store.add(key, 0)
