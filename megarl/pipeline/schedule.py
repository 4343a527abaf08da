"""A pipeline schedule is data: for each rank a list of operations, made by a pure function of `generators`.

`lower` adds the transfers between ranks; `check` refuses wrong schedules; `simulate` prices them; `execute` runs them.
Pure: no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One computation of a stage for a micro-batch.

    Kinds: forward (F), full backward (B), or its two halves: gradient with respect to the input (I), and gradient with
    respect to the linear layers' weights (W).
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A forward and a full backward of different micro-batches (and, mostly, stages) at the same time (F&B).

    On a GPU the one's communication hides behind the other's computation; elsewhere the forward runs first. Both
    inputs have to be there before it starts.
    """

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"{self.forward} & {self.backward}"


Item = Op | Pair


def parts(item: Item) -> tuple[Op, ...]:
    """The operations of an item, in the order in which they run one after the other."""
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    Attributes:
        name: of the generator.
        microbatches: M, numbered from 0.
        placement: for each stage the ranks that hold its parameters (more than one where a stage is mirrored; each
            micro-batch then passes through one of them, the one whose list has its operations).
        items: for each rank its operations and pairs in order.
    """

    name: str
    microbatches: int
    placement: tuple[tuple[int, ...], ...]
    items: tuple[tuple[Item, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages that the layers are cut into."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.items)

    @property
    def copies(self) -> int:
        """Parameter copies in one pipeline: 2 where stages are mirrored."""
        return max(len(ranks) for ranks in self.placement)

    @property
    def is_forward_only(self) -> bool:
        """Whether nothing is trained."""
        return all(op.kind == "F" for rank in range(self.ranks) for op in self.ops(rank))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters `rank` holds, ascending."""
        return tuple(stage for stage, ranks in enumerate(self.placement) if rank in ranks)

    def ops(self, rank: int) -> tuple[Op, ...]:
        """The operations of `rank` in order, pairs taken apart."""
        return tuple(op for item in self.items[rank] for op in parts(item))

    def forward_only(self) -> Schedule:
        """The same walk without backward operations, for log-probs and values."""
        return Schedule(f"{self.name} forward", self.microbatches, self.placement,
                        tuple(tuple(op for op in self.ops(rank) if op.kind == "F") for rank in range(self.ranks)))


PlacementName = Literal["looped", "v", "mirrored"]


def placement(name: PlacementName, ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """For each stage the ranks that hold it.

    looped    stage s on rank s mod P; `chunks` stages a rank.
    v         2P stages; rank r holds stages r and 2P-1-r, so that the first and the last are on rank 0.
    mirrored  P stages, each twice: on ranks s and P-1-s. Needs an even P.
    """
    if name == "looped":
        return tuple((stage % ranks,) for stage in range(ranks * chunks))
    if name == "v":
        return tuple((min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks))
    if ranks % 2:
        raise ValueError(f"mirrored stages need an even number of ranks, not {ranks}")
    return tuple((stage, ranks - 1 - stage) for stage in range(ranks))


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A tensor that crosses ranks: what `op` of rank `target` needs and rank `source` has computed."""

    op: Op
    source: int
    target: int

    @property
    def kind(self) -> Literal["activation", "gradient"]:
        """What the tensor is."""
        return "activation" if self.op.kind == "F" else "gradient"

    @property
    def channel(self) -> tuple[int, int, str]:
        """Transfers with equal (source, target, kind) arrive in the order they were sent; no tags are needed."""
        return self.source, self.target, self.kind

    def __str__(self) -> str:
        return f"{self.kind} for {self.op} from rank {self.source} to rank {self.target}"


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange, all its transfers at once, then one item (none at the end of a list).

    The exchange sends what the previous item made. It receives what others have made by then: always what its own item
    needs, unless an earlier exchange brought it, and often what later items need. Only the item that needs a transfer
    has to wait for it.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    item: Item | None


class Wiring:
    """Which operation hands its result to which, and where each one runs; of a complete schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.stages = schedule.stages
        self.home = {op: rank for rank in range(schedule.ranks) for op in schedule.ops(rank)}

    def needs(self, op: Op) -> Op | None:
        """The operation on a neighbouring stage whose result is this one's input; None if it needs none.

        A W needs only what its own I left on its rank.
        """
        return self._neighbour(op, -1)

    def feeds(self, op: Op) -> Op | None:
        """The operation on a neighbouring stage that takes this one's result; None if it gives none."""
        return self._neighbour(op, +1)

    def backward(self, forward: Op) -> Op | None:
        """The B or I that goes back through a forward; None in a forward-only schedule."""
        return self._either(forward.stage, forward.microbatch)

    def _neighbour(self, op: Op, along: int) -> Op | None:
        if op.kind == "W":
            return None
        stage = op.stage + (along if op.kind == "F" else -along)
        if not 0 <= stage < self.stages:
            return None
        return Op("F", stage, op.microbatch) if op.kind == "F" else self._either(stage, op.microbatch)

    def _either(self, stage: int, microbatch: int) -> Op | None:
        return next((op for kind in ("B", "I") if (op := Op(kind, stage, microbatch)) in self.home), None)

    def sends(self, item: Item) -> Iterator[Transfer]:
        """The transfers that take this item's results to other ranks."""
        for op in parts(item):
            taker = self.feeds(op)
            if taker and self.home[taker] != self.home[op]:
                yield Transfer(taker, self.home[op], self.home[taker])

    def receives(self, item: Item) -> Iterator[Transfer]:
        """The transfers that bring this item's inputs from other ranks."""
        for op in parts(item):
            giver = self.needs(op)
            if giver and self.home[giver] != self.home[op]:
                yield Transfer(op, self.home[giver], self.home[op])


def runnable(schedule: Schedule, wiring: Wiring) -> Iterator[tuple[int, int]]:
    """(rank, index) of the items in an order in which they can run, each after all that it needs.

    It ends early where no rank can go on.
    """
    at, done = [0] * schedule.ranks, set[Op]()
    moving = True
    while moving:
        moving = False
        for rank, items in enumerate(schedule.items):
            while at[rank] < len(items) and all(
                    (giver := wiring.needs(op)) is None or giver in done for op in parts(items[at[rank]])):
                done.update(parts(items[at[rank]]))
                yield rank, at[rank]
                at[rank] += 1
                moving = True


_COST = {"F": 1, "I": 1, "W": 1, "B": 2}  # positive; `lower` says why


def lower(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Each rank's items with the exchanges between them. Stages on the same rank exchange nothing.

    A result is sent in the exchange right after its item. It is received in the first exchange that begins no earlier
    than it was made, on the clock of an ideal run (F = I = W, instant transfers); that may be well before it is needed.

    So no list can hang, even where an exchange blocks its rank until all its transfers have met their other side (as
    NCCL's may: operations of a communicator run one after the other, and a send may have to wait for its receive). Say
    that each of some ranks is stuck in an exchange, waiting for the next one's to come to the other side of a
    transfer. That transfer was made no later than the first rank's exchange began, and after the exchange began in
    which the second is stuck: otherwise the second's side would be in that one or before. So each rank is stuck in an
    earlier exchange than the one before it, and the ranks cannot wait in a circle.

    Were each result received right before it is needed, ZB-V, interleaved 1F1B, DualPipeV and DualPipe would hang.

    The schedule must be complete and free of cycles (`check.check`).
    """
    wiring = Wiring(schedule)
    starts = [[0] * len(items) for items in schedule.items]
    free = [0] * schedule.ranks  # when the rank's last item ended
    made: dict[Op, int] = {}
    transfers: list[tuple[int, int, Transfer]] = []
    for rank, index in runnable(schedule, wiring):
        item = schedule.items[rank][index]
        starts[rank][index] = max(free[rank], *(made[giver] for op in parts(item) if (giver := wiring.needs(op))), 0)
        free[rank] = starts[rank][index] + sum(_COST[op.kind] for op in parts(item))
        made.update((op, free[rank]) for op in parts(item))
        transfers += [(free[rank], index, transfer) for transfer in wiring.sends(item)]
    sends, receives = ([[[] for _ in range(len(items) + 1)] for items in schedule.items] for _ in range(2))
    for time, index, transfer in sorted(transfers):
        sends[transfer.source][index + 1].append(transfer)
        receives[transfer.target][bisect_left(starts[transfer.target], time)].append(transfer)
    return tuple(tuple(Step(tuple(s), tuple(r), item)
                       for s, r, item in zip(sends[rank], receives[rank], (*items, None), strict=True))
                 for rank, items in enumerate(schedule.items))
