"""What the leaders and trainer 0 tell each other about groups, through the control store.

Leaders draw numbers, one after the other, each number once; a number may be issued when it is below the limit, which
trainer 0 raises with every step. They write into a log what they issue and what becomes of it. Trainer 0 reads the log
and announces what all trainers do next. What was read is deleted, so the store does not grow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed import PrefixStore, Store

from megarl.rollout.lease import read_counter

State = Literal["issued", "kept", "filtered", "dropped"]


def _store(store: Store) -> PrefixStore:
    """The ledger's part of the control store, over a connection of its own (a store serves one call at a time)."""
    return PrefixStore("ledger", store.clone())


@dataclass(frozen=True)
class Entry:
    """A line of the log.

    Attributes:
        number: of the group's draw.
        state: issued; kept, filtered (dynamic sampling) or dropped (no engine could answer it) once it is resolved.
        version: number of the newest weights when it was issued.
    """

    number: int
    state: State
    version: int = 0


class Tickets:
    """A leader's side of the ledger."""

    def __init__(self, store: Store) -> None:
        self._store = _store(store)

    def draw(self) -> int:
        """The next number of the run; it may be issued once it is below `limit`."""
        return self._store.add("drawn", 1) - 1

    def limit(self) -> int:
        """Numbers below may be issued."""
        return read_counter(self._store, "limit")

    def version(self) -> str:
        """The newest weights published; set before the first number may be issued."""
        return self._store.get("version").decode()

    def write(self, entry: Entry) -> None:
        """Append to the log."""
        place = self._store.add("log", 1)
        self._store.set(f"log/{place}", json.dumps(asdict(entry)))

    def replace(self, step: int, most: int) -> None:
        """Allow one more number in place of a lost one, at most `most` times while `step` is the next to train."""
        if self._store.add(f"replaced/{step}", 1) <= most:
            self._store.add("limit", 1)


class Book:
    """Trainer 0's side of the ledger.

    Attributes:
        read: entries of the log read so far.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.read, self._told = _store(store), 0, 0

    def entries(self) -> list[Entry]:
        """What was logged since the last call, in order."""
        found = []
        for place in range(self.read + 1, read_counter(self._store, "log") + 1):
            found.append(Entry(**json.loads(self._store.get(f"log/{place}"))))
            self._store.delete_key(f"log/{place}")
            self.read = place
        return found

    def set_version(self, version: str, step: int) -> None:
        """Name the newest weights, with which `step` is sampled."""
        self._store.set("version", version)
        self._store.delete_key(f"replaced/{step - 1}")

    def set_limit(self, limit: int) -> None:
        """Allow numbers below `limit`."""
        self._store.add("limit", limit - read_counter(self._store, "limit"))

    @property
    def limit(self) -> int:
        """Numbers below may be issued; leaders raise it too (see `Tickets.replace`)."""
        return read_counter(self._store, "limit")

    def announce(self, message: dict[str, Any]) -> None:
        """Say what all trainers do next.

        Whoever has not heard the last message or the one before (a stop, and the snapshot for its checkpoint) can
        still do so. Older ones are deleted: between the others all trainers meet in a collective.
        """
        self._told += 1
        self._store.set(f"told/{self._told}", json.dumps(message))
        self._store.delete_key(f"told/{self._told - 3}")


class Announcements:
    """Every trainer's ear for what trainer 0 announces."""

    def __init__(self, store: Store) -> None:
        self._store, self._heard = _store(store), 0

    def next(self) -> dict[str, Any] | None:
        """The next message if there is one."""
        key = f"told/{self._heard + 1}"
        if not self._store.check([key]):
            return None
        self._heard += 1
        return json.loads(self._store.get(key))
