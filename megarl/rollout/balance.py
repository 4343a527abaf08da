"""Which engine the next request goes to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.rollout.fleet import EngineRecord

AFFINITIES_MOST = 1 << 16  # keys remembered; the one that was not used for longest is forgotten first

Key = tuple[str, int]  # of an engine's process, `EngineRecord.key`


@dataclass(frozen=True)
class Load:
    """What an engine has to do, as its supervisor read it.

    Attributes:
        reading: counts the readings of this engine; a new number is a new reading.
        running, waiting: sequences being decoded, and in its queue; of all leaders.
    """

    reading: int
    running: int
    waiting: int


class Balancer:
    """Spreads requests over engines: the next one goes where least is to do. One per leader.

    What an engine has to do is its last published load (every leader's sequences) and what this leader has sent there
    since that reading, less what came back since; of an engine without a reading, what this leader has there. As the
    other leaders act on the same reading, this leader's change since then stands for theirs as well: else all of them
    would fill the same engine until the next reading.

    Args:
        turn: ties are broken from this place on, so that leaders do not all begin with the same engine.
        leaders: how many leaders spread requests over the same engines.
    """

    def __init__(self, turn: int = 0, leaders: int = 1) -> None:
        self._turn, self._leaders = turn, leaders
        self._in_flight: Counter[Key] = Counter()  # this leader's sequences
        self._at_reading: dict[Key, tuple[int, int]] = {}  # reading -> this leader's sequences when it was first seen
        self._homes: OrderedDict[Hashable, Key] = OrderedDict()

    def take(self, engines: list[EngineRecord], avoid: set[Key], affinity: Hashable = None,
             sequences: int = 1) -> EngineRecord:
        """An engine for one request, which stays with it until `give_back`.

        Args:
            engines: those that may serve it, at least one.
            avoid: one of these only if there is no other.
            affinity: requests with the same value go to the same engine as long as its process lives and it is not
                to be avoided: a conversation, or a sample that is resumed, finds its prefix in that engine's cache.
            sequences: how many the request makes the engine decode.
        """
        allowed = [record for record in engines if record.key not in avoid] or engines
        for record in engines:
            self._note_reading(record)
        home = self._homes.get(affinity) if affinity is not None else None
        chosen = next((record for record in allowed if record.key == home), None) or self._least(allowed)
        if affinity is not None:
            self._homes[affinity] = chosen.key
            self._homes.move_to_end(affinity)
            if len(self._homes) > AFFINITIES_MOST:
                self._homes.popitem(last=False)
        self._in_flight[chosen.key] += sequences
        return chosen

    def give_back(self, engine: EngineRecord, sequences: int = 1) -> None:
        """The request is done with its engine; `sequences` as in `take`."""
        self._in_flight[engine.key] -= sequences
        if not self._in_flight[engine.key]:
            del self._in_flight[engine.key]

    def forget(self, affinity: Hashable) -> None:
        """No more requests with this affinity will come."""
        self._homes.pop(affinity, None)

    def load(self, engine: EngineRecord) -> int:
        """Sequences that the engine is thought to have to do."""
        own = self._in_flight[engine.key]
        if engine.load is None:
            return own
        _, own_then = self._at_reading[engine.key]
        return max(own, engine.load.running + engine.load.waiting + self._leaders * (own - own_then))

    def _least(self, engines: list[EngineRecord]) -> EngineRecord:
        self._turn += 1
        order = range(len(engines))
        return engines[min(order, key=lambda place: (self.load(engines[place]), (place - self._turn) % len(engines)))]

    def _note_reading(self, engine: EngineRecord) -> None:
        seen = self._at_reading.get(engine.key)
        if engine.load is not None and (seen is None or seen[0] != engine.load.reading):
            self._at_reading = {key: value for key, value in self._at_reading.items() if key[0] != engine.id}
            self._at_reading[engine.key] = engine.load.reading, self._in_flight[engine.key]
