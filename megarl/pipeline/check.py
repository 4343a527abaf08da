"""Refuses a pipeline schedule that is incomplete, misplaced, out of order, cyclic or able to deadlock. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.pipeline.schedule import Item, Op, Pair, Schedule, Step, Transfer, Wiring, lower, parts, runnable


class ScheduleError(ValueError):
    """A wrong schedule. Attributes: rank, item (None where no single one is to blame), reason."""

    def __init__(self, rank: int | None, item: Item | None, reason: str) -> None:
        self.rank, self.item, self.reason = rank, item, reason
        place = [f"rank {rank}"] if rank is not None else []
        super().__init__(": ".join([*place, *([str(item)] if item else []), reason]))


@dataclass(frozen=True)
class Report:
    """What `check` found out about a right schedule.

    Attributes:
        steps: for each rank its items with the exchanges between them (`schedule.lower`).
        peak_live: for each rank the largest number of stage activations held at once. An activation is held from its F
            to its B, or to its W where the backward is split.
        peak: the same as multiples of a P-th of the model, by which schedules of different placement compare.
    """

    steps: tuple[tuple[Step, ...], ...]
    peak_live: tuple[int, ...]
    peak: tuple[float, ...]


def check(schedule: Schedule) -> Report:
    """Refuse a wrong schedule; report on a right one.

    Right means:
        - every (stage, micro-batch) has one F and, unless the schedule is forward-only, either one B or one I and one
          W, all on one rank that holds the stage;
        - F comes before B or I, I before W, and what a stage takes from another one on its rank is made before;
        - the W of a stage are in the order of its I, and no B comes between an I and its W (Transformer Engine keeps
          them in a queue);
        - a pair is an F and a B of different (stage, micro-batch);
        - what crosses ranks is taken in the order in which it was made, for each (source, target, kind);
        - all ranks reach their end, even if an exchange blocks its rank until every transfer in it has met its other
          side (rendezvous, the strictest reading of NCCL's behaviour).

    Raises:
        ScheduleError: names rank, operation and reason.
    """
    _check_placement(schedule)
    _check_pairs(schedule)
    _check_complete(schedule)
    wiring = Wiring(schedule)
    peak = tuple(_check_order(schedule, wiring, rank) for rank in range(schedule.ranks))
    _check_fifo(((wiring.sends(item), wiring.receives(item), item) for item in items) for items in schedule.items)
    _check_cycles(schedule, wiring)
    steps = lower(schedule)
    check_steps(steps)
    return Report(steps, peak, tuple(live * schedule.ranks / schedule.stages for live in peak))


def check_steps(steps: tuple[tuple[Step, ...], ...]) -> None:
    """Refuse exchanges that do not fit each other or can hang (see `check`).

    Raises:
        ScheduleError: names rank, the item after the exchange, and reason.
    """
    _check_fifo(((step.sends, step.receives, step.item) for step in rank_steps) for rank_steps in steps)
    _replay(steps)


def _check_placement(schedule: Schedule) -> None:
    for stage, ranks in enumerate(schedule.placement):
        if not ranks or not all(0 <= rank < schedule.ranks for rank in ranks):
            raise ScheduleError(None, None, f"stage {stage} is placed on ranks {list(ranks)} of {schedule.ranks}")


def _check_pairs(schedule: Schedule) -> None:
    for rank, items in enumerate(schedule.items):
        for pair in (item for item in items if isinstance(item, Pair)):
            forward, backward = pair.forward, pair.backward
            if (forward.kind, backward.kind) != ("F", "B"):
                raise ScheduleError(rank, pair, "a pair is a forward and a full backward, in this order")
            if (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
                raise ScheduleError(rank, pair, "its backward needs its forward; they cannot run at the same time")


def _check_complete(schedule: Schedule) -> None:
    """Each operation once, where it belongs."""
    home: dict[Op, int] = {}
    for rank in range(schedule.ranks):
        for op in schedule.ops(rank):
            if not (0 <= op.stage < schedule.stages and 0 <= op.microbatch < schedule.microbatches):
                raise ScheduleError(rank, op, f"there are only {schedule.stages} stages and {schedule.microbatches} "
                                              "micro-batches")
            if rank not in schedule.placement[op.stage]:
                raise ScheduleError(rank, op, f"its stage is placed on rank {schedule.placement[op.stage]}")
            if op in home:
                raise ScheduleError(rank, op, f"it is already on rank {home[op]}")
            home[op] = rank
    forward_only = schedule.is_forward_only
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            full, *halves = (Op(kind, stage, microbatch) for kind in "BIW")
            if full in home and (twice := next((op for op in halves if op in home), None)):
                raise ScheduleError(home[twice], twice, "there is a full backward as well")
            backward = [] if forward_only else halves if any(op in home for op in halves) else [full]
            wanted = [Op("F", stage, microbatch), *backward]
            if missing := [op for op in wanted if op not in home]:
                rank = next((home[op] for op in wanted if op in home), schedule.placement[stage][0])
                raise ScheduleError(rank, missing[0], "it is missing")
            if strays := [op for op in wanted if home[op] != home[wanted[0]]]:
                raise ScheduleError(home[strays[0]], strays[0], f"its F is on rank {home[wanted[0]]}")


def _check_order(schedule: Schedule, wiring: Wiring, rank: int) -> int:
    """The largest number of activations that a rank holds; refuses operations before what they need on this rank."""
    done: set[Op] = set()
    awaiting_w: dict[int, deque[int]] = defaultdict(deque)  # stage -> micro-batches by order of I
    live = peak = 0
    for op in schedule.ops(rank):
        before = Op("I" if op.kind == "W" else "F", op.stage, op.microbatch)
        if op.kind != "F" and before not in done:
            raise ScheduleError(rank, op, f"its {before.kind} comes later")
        giver = wiring.needs(op)
        if giver and wiring.home[giver] == rank and giver not in done:
            raise ScheduleError(rank, op, f"it needs {giver}, which comes later")
        if op.kind == "B" and awaiting_w[op.stage]:
            raise ScheduleError(rank, op, f"micro-batch {awaiting_w[op.stage][0]} still waits for its W in this stage")
        if op.kind == "I":
            awaiting_w[op.stage].append(op.microbatch)
        elif op.kind == "W" and (first := awaiting_w[op.stage].popleft()) != op.microbatch:
            raise ScheduleError(rank, op, f"the W of a stage follow the order of its I: micro-batch {first} is first")
        live += {"F": 1, "I": 0}.get(op.kind, -1)
        peak = max(peak, live)
        done.add(op)
    return peak


_Ends = tuple[Iterable[Transfer], Iterable[Transfer], Item | None]


def _check_fifo(ranks: Iterable[Iterable[_Ends]]) -> None:
    """Both ends of each channel in the same order.

    Args:
        ranks: for each rank in order what it sends and what it receives around an item, and the item.
    """
    sent: dict[tuple, deque[Transfer]] = defaultdict(deque)
    received: list[tuple[int, Transfer, Item | None]] = []
    for rank, ends in enumerate(ranks):
        for sends, receives, item in ends:
            for transfer in sends:
                sent[transfer.channel].append(transfer)
            received += [(rank, transfer, item) for transfer in receives]
    for rank, transfer, item in received:
        channel = sent[transfer.channel]
        first = channel.popleft() if channel else None
        if first is None:
            raise ScheduleError(rank, item, f"nobody sends the {transfer}")
        if first != transfer:
            raise ScheduleError(rank, item, f"it is out of order in its channel: rank {transfer.source} sends the one "
                                            f"for {first.op} first")


def _check_cycles(schedule: Schedule, wiring: Wiring) -> None:
    """All items can run, each after those that it needs, if nothing else has to be waited for."""
    at = [0] * schedule.ranks
    done: set[Op] = set()
    for rank, index in runnable(schedule, wiring):
        at[rank] += 1
        done.update(parts(schedule.items[rank][index]))
    stuck = [(rank, items[at[rank]]) for rank, items in enumerate(schedule.items) if at[rank] < len(items)]
    if stuck:
        unmet = (next(t for t in wiring.receives(item) if wiring.needs(t.op) not in done) for _, item in stuck)
        waits = "; ".join(f"rank {transfer.target} waits for the {transfer}" for transfer in unmet)
        raise ScheduleError(*stuck[0], f"cyclic: {waits}")


def _replay(steps: tuple[tuple[Step, ...], ...]) -> None:
    """Walk all ranks to the end of their lists; refuse a walk that stops.

    A rank enters the exchange of its next step, and leaves it when each send and receive has met its other side.
    """
    at = [0] * len(steps)
    posted: set[tuple[str, Transfer]] = set()

    def post(rank: int) -> None:
        if at[rank] < len(steps[rank]):
            step = steps[rank][at[rank]]
            posted.update(("send", transfer) for transfer in step.sends)
            posted.update(("receive", transfer) for transfer in step.receives)

    def unmet(rank: int) -> list[str]:
        step = steps[rank][at[rank]]
        return ([f"to receive the {t}" for t in step.receives if ("send", t) not in posted]
                + [f"to send the {t}" for t in step.sends if ("receive", t) not in posted])

    for rank in range(len(steps)):
        post(rank)
    moving = True
    while moving:
        moving = False
        for rank in range(len(steps)):
            while at[rank] < len(steps[rank]) and not unmet(rank):
                at[rank] += 1
                post(rank)
                moving = True
    stuck = [rank for rank in range(len(steps)) if at[rank] < len(steps[rank])]
    if stuck:
        waits = "; ".join(f"rank {rank} waits {unmet(rank)[0]}" for rank in stuck)
        raise ScheduleError(stuck[0], steps[stuck[0]][at[stuck[0]]].item,
                            f"deadlock if sends block until received: {waits}")
