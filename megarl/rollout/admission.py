"""Which groups may be under way while the trainers train, and which of them a step takes. Pure functions.

Weights have numbers: version v is published after step v (version 0 before the first), and the step that trains version
v into v + 1 is step v. A group that was issued when v was the newest version holds no token of older weights, so it is
fresh enough for step v + max_lag and all before it: that step is its *deadline*. A step takes `need` groups. It must
take those without which a later step would have more groups to take than fit before their deadlines; beyond them it
takes what finished first. So no group ever becomes too old, none is thrown away, and a slow one holds up nobody until
its deadline has come. With max_lag 0 a step takes exactly the groups of its own version: synchronous training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pending:
    """A group that was issued and not yet taken.

    Attributes:
        number: of its draw.
        issued: number of the newest weights when it was issued.
        finished: rank in the order in which groups finished; None while it is under way.
    """

    number: int
    issued: int
    finished: int | None


@dataclass(frozen=True)
class Choice:
    """What a step does now: take `numbers`, or, if that is None, wait.

    Attributes:
        numbers: of the groups to train on, ascending.
        waits_for: "samples": fewer than a step needs have finished; "deadline": enough have, but not some that must not
            become older; "" if it takes.
    """

    numbers: list[int] | None
    waits_for: str = ""


def window(need: int, ahead: float, step: int, steps: int) -> int:
    """How many groups may be under way or wait to be taken while `step` (from 0) is the next to train.

    Args:
        need: groups of a step.
        ahead: how many steps' groups beyond those of the next step.
        step, steps: the next step and the number of steps of the run, beyond which nothing is sampled.
    """
    return int(need * min(1 + ahead, steps - step) + 1e-9)  # 45 * 1.4 is a little below 63


def fitting(issued: Sequence[int], need: int, step: int, max_lag: int) -> list[int]:
    """Which of the finished groups of an earlier life can be trained before their deadlines.

    All of them, unless the run's limits have changed. As many as can be, those that finished first before others.

    Args:
        issued: of each group the number of the newest weights when it was issued, in the order in which they finished.
        need, step, max_lag: as of `choose`.
    Returns:
        Their places, ascending.
    """
    room = [need * (late + 1) for late in range(max_lag + 1)]  # for groups with deadlines up to step + late
    kept = []
    for place, version in enumerate(issued):
        late = version + max_lag - step
        if late >= 0 and min(room[late:]) > 0:
            room[late:] = [left - 1 for left in room[late:]]
            kept.append(place)
    return kept


def choose(pending: Iterable[Pending], need: int, step: int, max_lag: int, *, closed: bool = False) -> Choice:
    """What step `step` takes, by earliest deadline.

    After the take the groups with deadlines up to s must fit into the steps up to s: at most need * (s - step) of them
    may be left, for every s >= step. The fewest that this asks for are taken from those deadlines, in the order in
    which they finished.

    Args:
        pending: all groups that were issued and not taken.
        need: groups that a step takes.
        step: the step, which is also the number of the newest weights.
        max_lag: versions that a token may be behind.
        closed: no group will be issued before the step is over: it takes fewer if there are no more.
    """
    pending = list(pending)
    done = sorted((one for one in pending if one.finished is not None), key=lambda one: one.finished)
    chosen: dict[int, Pending] = {}
    for last in range(step, step + max_lag + 1):  # every group chosen so far has its deadline by then
        urgent = sum(one.issued + max_lag <= last for one in pending)
        must = min(urgent - need * (last - step), need)
        for one in done:
            if len(chosen) < must and one.issued + max_lag <= last:
                chosen.setdefault(one.number, one)
        if len(chosen) < must:
            return Choice(None, "deadline" if len(done) >= need else "samples")
    for one in done:
        if len(chosen) < need:
            chosen.setdefault(one.number, one)
    if len(chosen) < need and not (closed and len(done) == len(pending)):
        return Choice(None, "samples")
    return Choice(sorted(chosen))
