"""Which engines are updated together, and which pipeline stage sends to which of them when. Pure.

A set of engines shares one process group with each source. A dead engine stalls its own set only, and an engine that
comes or goes makes only the groups of its set anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megarl.rollout.fleet import EngineRecord

T = TypeVar("T")


@dataclass(frozen=True)
class EngineSet:
    """Engines that are updated together.

    Attributes:
        number: never used again for other members: groups are named by it.
        engines: in the order of their ranks.
    """

    number: int
    engines: tuple[EngineRecord, ...]


def assign(sets: Sequence[EngineSet], engines: Sequence[EngineRecord], size: int, first_number: int) -> list[EngineSet]:
    """Sets of at most `size` for exactly these engines.

    A set whose members are all still there stays as it is, unless it takes in a newcomer; the others get new numbers,
    from `first_number` on. Newcomers fill sets that have changed anyway before others with room, then new ones.
    """
    present = {engine.key for engine in engines}
    homes = [[engine for engine in old.engines if engine.key in present] for old in sets]
    kept = [old if len(home) == len(old.engines) else None for old, home in zip(sets, homes, strict=True)]
    housed = {engine.key for home in homes for engine in home}
    for engine in (engine for engine in engines if engine.key not in housed):
        room = [place for place, home in enumerate(homes) if 0 < len(home) < size]
        place = min(room, key=lambda place: (kept[place] is not None, place), default=None)
        if place is None:
            place = len(homes)
            homes.append([])
            kept.append(None)
        homes[place].append(engine)
        kept[place] = None
    found = []
    for old, home in zip(kept, homes, strict=True):
        if home:
            found.append(old or EngineSet(first_number, tuple(home)))
            first_number += old is None
    return found


def rounds(stages: int, sets: Sequence[T]) -> list[list[list[T]]]:
    """`[round][stage]` -> the sets that this stage's source sends to.

    In as many rounds as there are stages, each stage meets each set once, and no set has two sources at a time (an
    engine serves one bucket after the other: two sources with two engines could each wait for the engine that serves
    the other one). The sets are dealt into at most as many columns as there are stages, and the stages go round the
    columns, so that all of them send at the same time where there are sets enough; the sets of a column get each
    bucket in parallel.
    """
    columns = [list(sets[number::min(stages, len(sets))]) for number in range(min(stages, len(sets)))]
    return [[columns[turn] if (turn := (number - stage) % stages) < len(columns) else [] for stage in range(stages)]
            for number in range(stages)]
