"""A pipeline schedule is data: for each rank a list of operations, made by a pure function.

`lower` adds the transfers between ranks; `check` refuses wrong schedules; `execute` runs them. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One computation: the forward (F) or the full backward (B) of a stage for a micro-batch."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    Attributes:
        name: of the generator.
        microbatches: M, numbered from 0.
        placement: for each stage the ranks that hold its parameters (more than one where a stage is mirrored; each
            micro-batch then passes through one of them, the one whose list has its operations).
        ops: for each rank its operations in order.
    """

    name: str
    microbatches: int
    placement: tuple[tuple[int, ...], ...]
    ops: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages that the layers are cut into."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ops)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters `rank` holds, ascending."""
        return tuple(stage for stage, ranks in enumerate(self.placement) if rank in ranks)

    def forward_only(self) -> Schedule:
        """The same walk without backward operations, for log-probs and values."""
        return Schedule(f"{self.name} forward", self.microbatches, self.placement,
                        tuple(tuple(op for op in ops if op.kind == "F") for ops in self.ops))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that crosses ranks: what `op` of rank `target` needs and rank `source` has computed."""

    op: Op
    source: int
    target: int

    @property
    def channel(self) -> tuple[int, int, str]:
        """Transfers with equal (source, target, kind) arrive in the order they were sent; no tags are needed."""
        return self.source, self.target, self.op.kind

    def __str__(self) -> str:
        what = "activation" if self.op.kind == "F" else "gradient"
        return f"{what} for {self.op} from rank {self.source} to rank {self.target}"


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange, all its transfers at once, then one operation (none at the end of a list).

    The exchange sends what the previous operation made and receives what this one needs.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    op: Op | None


def needs(op: Op, stages: int) -> Op | None:
    """The operation on a neighbouring stage whose result is this one's input; None at the ends of the pipeline."""
    stage = op.stage - 1 if op.kind == "F" else op.stage + 1
    return Op(op.kind, stage, op.microbatch) if 0 <= stage < stages else None


def feeds(op: Op, stages: int) -> Op | None:
    """The operation on a neighbouring stage that takes this one's result; None at the ends of the pipeline."""
    stage = op.stage + 1 if op.kind == "F" else op.stage - 1
    return Op(op.kind, stage, op.microbatch) if 0 <= stage < stages else None


def lower(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Each rank's operations with the exchanges between them. Stages on the same rank exchange nothing.

    The schedule must be complete (`check.check`).
    """
    home = {op: rank for rank, ops in enumerate(schedule.ops) for op in ops}

    def crossing(op: Op | None, rank: int) -> Iterator[Transfer]:
        """Transfers between `rank`, which computes `op`, and the rank of the operation that takes its result."""
        taker = feeds(op, schedule.stages) if op else None
        if taker and home[taker] != rank:
            yield Transfer(taker, rank, home[taker])

    lowered = []
    for rank, ops in enumerate(schedule.ops):
        steps, last = [], None
        for op in ops:
            giver = needs(op, schedule.stages)
            receives = tuple(crossing(giver, home[giver])) if giver else ()
            steps.append(Step(tuple(crossing(last, rank)), receives, op))
            last = op
        steps.append(Step(tuple(crossing(last, rank)), (), None))
        lowered.append(tuple(steps))
    return tuple(lowered)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); one stage per rank, M live activations."""
    ops = tuple(tuple(Op(kind, rank, m) for kind in "FB" for m in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", microbatches, _looped(ranks), ops)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush; Narayanan et al. 2021): rank r runs P - r - 1 forwards ahead, then alternates.

    One stage per rank; at most P - r live activations on rank r. Any M >= 1.
    """
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        ops = [Op("F", rank, m) for m in range(ahead)]
        for m in range(microbatches - ahead):
            ops += [Op("F", rank, m + ahead), Op("B", rank, m)]
        ops += [Op("B", rank, m) for m in range(microbatches - ahead, microbatches)]
        lists.append(tuple(ops))
    return Schedule("1f1b", microbatches, _looped(ranks), tuple(lists))


def _looped(ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(ranks))


GENERATORS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
