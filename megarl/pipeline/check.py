"""Refuses a pipeline schedule that is incomplete, misplaced, out of order, cyclic or able to deadlock. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from megarl.pipeline.schedule import Op, Schedule, Step, Transfer, lower


class ScheduleError(ValueError):
    """A wrong schedule. Attributes: rank, op (None where no single operation is to blame), reason."""

    def __init__(self, rank: int | None, op: Op | None, reason: str) -> None:
        self.rank, self.op, self.reason = rank, op, reason
        place = [f"rank {rank}"] if rank is not None else []
        super().__init__(": ".join([*place, *([str(op)] if op else []), reason]))


@dataclass(frozen=True)
class Report:
    """What `check` found out about a right schedule.

    Attributes:
        steps: for each rank its operations with the exchanges between them (`schedule.lower`).
        peak_live: for each rank the largest number of stage activations held at once, between F and B.
    """

    steps: tuple[tuple[Step, ...], ...]
    peak_live: tuple[int, ...]


def check(schedule: Schedule) -> Report:
    """Refuse a wrong schedule; report on a right one.

    Right means: every (stage, micro-batch) has one F and, unless the schedule is forward-only, one B, on a rank that
    holds the stage, both on the same rank, B after F; transfers of each channel are received in the order they are
    sent; and all ranks reach their end even if an exchange blocks its rank until every transfer in it has met its
    other side (rendezvous, the strictest reading of NCCL's behaviour).

    Raises:
        ScheduleError: names rank, operation and reason.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    peak = tuple(_peak_live(rank, ops) for rank, ops in enumerate(schedule.ops))
    steps = lower(schedule)
    _check_fifo(steps)
    _replay(steps, blocking_sends=False)
    _replay(steps, blocking_sends=True)
    return Report(steps, peak)


def _check_placement(schedule: Schedule) -> None:
    for stage, ranks in enumerate(schedule.placement):
        if not ranks or not all(0 <= rank < schedule.ranks for rank in ranks):
            raise ScheduleError(None, None, f"stage {stage} is placed on ranks {list(ranks)} of {schedule.ranks}")


def _check_complete(schedule: Schedule) -> None:
    """Each operation once, where it belongs."""
    forward_only = all(op.kind == "F" for ops in schedule.ops for op in ops)
    home: dict[Op, int] = {}
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if not (0 <= op.stage < schedule.stages and 0 <= op.microbatch < schedule.microbatches):
                raise ScheduleError(rank, op, f"there are only {schedule.stages} stages and {schedule.microbatches} "
                                              "micro-batches")
            if rank not in schedule.placement[op.stage]:
                raise ScheduleError(rank, op, f"its stage is placed on rank {schedule.placement[op.stage]}")
            if op in home:
                raise ScheduleError(rank, op, f"it is already on rank {home[op]}")
            home[op] = rank
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            ops = [Op(kind, stage, microbatch) for kind in ("F" if forward_only else "FB")]
            for op in ops:
                if op not in home:
                    raise ScheduleError(schedule.placement[stage][0], op, "it is missing")
            if len({home[op] for op in ops}) > 1:
                raise ScheduleError(home[ops[1]], ops[1], f"its F is on rank {home[ops[0]]}")


def _peak_live(rank: int, ops: tuple[Op, ...]) -> int:
    """Largest number of forwards without their backward; refuses a backward before its forward."""
    live, peak = set(), 0
    for op in ops:
        if op.kind == "F":
            live.add((op.stage, op.microbatch))
            peak = max(peak, len(live))
        elif (op.stage, op.microbatch) not in live:
            raise ScheduleError(rank, op, "its F comes later")
        else:
            live.remove((op.stage, op.microbatch))
    return peak


def _check_fifo(steps: tuple[tuple[Step, ...], ...]) -> None:
    """Receives of each channel in the order of its sends."""
    sent: dict[tuple, deque[Transfer]] = defaultdict(deque)
    for rank_steps in steps:
        for step in rank_steps:
            for transfer in step.sends:
                sent[transfer.channel].append(transfer)
    for rank, rank_steps in enumerate(steps):
        for step in rank_steps:
            for transfer in step.receives:
                first = sent[transfer.channel].popleft()
                if first != transfer:
                    raise ScheduleError(rank, step.op, f"it is out of order in its channel: rank {transfer.source} "
                                                       f"sends the one for micro-batch {first.op.microbatch} first")


def _replay(steps: tuple[tuple[Step, ...], ...], blocking_sends: bool) -> None:
    """Walk all ranks to the end of their lists; refuse a walk that stops.

    A rank enters the exchange of its next step, and leaves it when every receive (and, with blocking sends, every
    send) has met its other side.
    """
    at = [0] * len(steps)
    posted: set[tuple[str, Transfer]] = set()

    def post(rank: int) -> None:
        if at[rank] < len(steps[rank]):
            step = steps[rank][at[rank]]
            posted.update(("send", transfer) for transfer in step.sends)
            posted.update(("receive", transfer) for transfer in step.receives)

    def unmet(rank: int) -> list[Transfer]:
        step = steps[rank][at[rank]]
        waits = [t for t in step.receives if ("send", t) not in posted]
        return waits + [t for t in step.sends if blocking_sends and ("receive", t) not in posted]

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
        why = "deadlock if sends block until received" if blocking_sends else "cyclic"
        waits = "; ".join(f"rank {rank} waits for the {unmet(rank)[0]}" for rank in stuck)
        raise ScheduleError(stuck[0], steps[stuck[0]][at[stuck[0]]].op, f"{why}: {waits}")
