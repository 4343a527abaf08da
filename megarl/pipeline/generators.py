"""The generators of schedules, and what each one asks for. Pure functions of the numbers of ranks and micro-batches.

P is the number of pipeline ranks, r one of them, M the number of micro-batches. Every list is derived from the paper or
repository named at its generator; peaks are in stage activations held by one rank, see `check.Report`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megarl.pipeline.schedule import Item, Op, Pair, PlacementName, Schedule, parts, placement


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); one stage per rank, M live activations."""
    items = tuple(tuple(Op(kind, rank, m) for kind in "FB" for m in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", microbatches, placement("looped", ranks), items)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush; Narayanan et al. 2021): rank r runs P - r - 1 forwards ahead, then alternates.

    One stage per rank; at most P - r live activations on rank r. Any M >= 1.
    """
    lists = []
    for rank in range(ranks):
        forwards, backwards = ([Op(kind, rank, m) for m in range(microbatches)] for kind in "FB")
        lists.append(tuple(_alternate(forwards, backwards, ranks - rank - 1)))
    return Schedule("1f1b", microbatches, placement("looped", ranks), tuple(lists))


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): `chunks` stages per rank, in groups of P micro-batches.

    A rank takes P micro-batches through its first stage, the same ones through its second and so on, then the next P;
    backwards in the same way from its last stage. It runs 2(P - r - 1) + (chunks - 1)P forwards ahead. At most
    P * chunks + P - 1 live activations. M need not be a multiple of P: the last group then has holes.
    """
    walk = [(chunk, group + k) for group in range(0, microbatches, ranks) for chunk in range(chunks)
            for k in range(ranks)]
    lists = []
    for rank in range(ranks):
        forwards = [Op("F", chunk * ranks + rank, m) for chunk, m in walk]
        backwards = [Op("B", (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in walk]
        lists.append(tuple(_alternate(forwards, backwards, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)))
    return _first(microbatches, Schedule("interleaved", microbatches, placement("looped", ranks, chunks), tuple(lists)))


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2024, "Zero Bubble Pipeline Parallelism"): 1F1B whose W are put off to fill bubbles.

    On rank r a W runs r micro-batches behind its I, so that every rank holds P activations, 1F1B's maximum. Any M >= 1.
    """
    lists = []
    for rank in range(ranks):
        forwards, backwards = ([Op(kind, rank, m) for m in range(microbatches)] for kind in "FI")
        items: list[Op] = []
        for op in _alternate(forwards, backwards, ranks - rank - 1):
            items.append(op)
            if op.kind == "I" and op.microbatch >= rank:
                items.append(Op("W", rank, op.microbatch - rank))
        items += [Op("W", rank, m) for m in range(max(microbatches - rank, 0), microbatches)]
        lists.append(tuple(items))
    return Schedule("zb-h1", microbatches, placement("looped", ranks), tuple(lists))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024): two stages per rank in a V; no rank ever idles between its operations if F = I = W.

    At most 2P live activations. Made for M >= 2P - 1; fewer micro-batches leave holes.
    """
    full = max(microbatches, 2 * ranks - 1)
    lists = []
    for rank in range(ranks):
        lanes = _Lanes((rank, range(full)), (2 * ranks - 1 - rank, range(full)))
        after = ranks - rank - 1  # ranks between this one and the turn of the V
        lanes.run("F0", 2 * after + 1)
        lanes.run("F1 F0", rank)
        lanes.run("F1 I1 W", after + 1)
        lanes.run("F0 I0 W F1 I1 W", full - 2 * ranks + rank + 1)
        lanes.run("I0 W F1 I1 W", after)
        lanes.run("I0 I1", rank)
        lanes.run("I0 W", after + 1)
        lanes.run("W", 2 * rank)
        lists.append(tuple(lanes.items))
    return _first(microbatches, Schedule("zb-v", full, placement("v", ranks), tuple(lists)))


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek's DualPipe repository, 2025): DualPipe's order on the stages of a V, with F&B pairs.

    At most 2P + 1 live activations. Needs M >= 2P.
    """
    lists = tuple(tuple(_dual(ranks, rank, (rank, range(microbatches)), (2 * ranks - 1 - rank, range(microbatches))))
                  for rank in range(ranks))
    return Schedule("dualpipev", microbatches, placement("v", ranks), lists)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-V3 report and repository, 2024): micro-batches enter at both ends of mirrored stages.

    The first half (the larger one of an odd M, where the other has a hole) enters at rank 0 and finds stage s on rank
    s, the rest enters at rank P-1 and finds stage s on rank P-1-s. At most P + 1 live activations, of stages twice as
    large as DualPipeV's. Needs an even P and M >= 2P.
    """
    half = (microbatches + 1) // 2
    down, up = range(half), range(half, 2 * half)
    lists = []
    for rank in range(ranks):
        near = min(rank, ranks - 1 - rank)
        lanes = (rank, down), (ranks - 1 - rank, up)
        lists.append(tuple(_dual(ranks // 2, near, *(lanes if rank == near else reversed(lanes)))))
    return _first(microbatches, Schedule("dualpipe", 2 * half, placement("mirrored", ranks), tuple(lists)))


def mirrored_zb_v(ranks: int, microbatches: int) -> Schedule:
    """What mirrored stages run if there are too few micro-batches for DualPipe: ZB-V on each half of the ranks.

    Micro-batches 0 .. ceil(M/2) - 1 stay on ranks 0 .. P/2 - 1, the others on their mirrors. Needs an even P.
    """
    half = (microbatches + 1) // 2
    lower = zb_v(ranks // 2, half).items
    upper = tuple(tuple(Op(op.kind, op.stage, op.microbatch + half) for op in items)
                  for items in zb_v(ranks // 2, microbatches - half).items)
    return Schedule("mirrored-zb-v", microbatches, placement("mirrored", ranks), lower + upper[::-1])


def _alternate(forwards: list[Op], backwards: list[Op], ahead: int) -> Iterator[Op]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead:]


def _first(microbatches: int, schedule: Schedule) -> Schedule:
    """The schedule without its operations on later micro-batches; what is left of a pair stays."""
    def kept(items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            ops = [op for op in parts(item) if op.microbatch < microbatches]
            yield from [item] if len(ops) == len(parts(item)) else ops

    return Schedule(schedule.name, microbatches, schedule.placement, tuple(tuple(kept(i)) for i in schedule.items))


def _dual(half: int, near: int, lane0: tuple[int, range], lane1: tuple[int, range]) -> list[Item]:
    """The list of one rank of DualPipe or DualPipeV, in the repository's eight phases.

    Args:
        half: ranks between an end and the middle (DualPipe) or the turn (DualPipeV).
        near: this rank's distance from its end, 0 .. half - 1.
        lane0: the stage that comes first for micro-batches from this end, and those micro-batches.
        lane1: the other stage of this rank and its micro-batches.
    """
    lanes, after = _Lanes(lane0, lane1), half - near - 1
    lanes.run("F0", 2 * after)
    lanes.run("F0 F1", near + 1)
    lanes.run("I1 W F1", after)
    main = len(lane0[1]) - 2 * half + near + 1
    if after == 0:  # where the lanes meet, the first two run apart, which shortens the bubble
        lanes.run("F0 B1 F1&B0", 1)
        main -= 1
    lanes.run("F0&B1 F1&B0", main)
    lanes.run("B1 F1&B0", after)
    for number in range(2 * (near + 1)):  # the second half leaves its W for the bubbles
        lanes.run(f"{'B' if number <= near else 'I'}{1 - number % 2}", 1)
    lanes.run("W I0", after)
    lanes.run("W", near + 1)
    return lanes.items


class _Lanes:
    """The growing list of a rank with two stages ("lanes"), each with the micro-batches that pass through it in order.

    `run` takes words such as F0, I1, F0&B1: an operation takes the next micro-batch of its lane; W takes the oldest I
    of both lanes that has had none.
    """

    def __init__(self, *lanes: tuple[int, range]) -> None:
        self.items: list[Item] = []
        self._stages = [stage for stage, _ in lanes]
        self._forward, self._backward = ([iter(microbatches) for _, microbatches in lanes] for _ in "FB")
        self._without_w: deque[Op] = deque()

    def run(self, words: str, times: int) -> None:
        """Append the operations of the words, `times` times."""
        for word in words.split() * times:
            ops = [self._op(name) for name in word.split("&")]
            self.items.append(Pair(*ops) if len(ops) == 2 else ops[0])

    def _op(self, name: str) -> Op:
        if name == "W":
            done = self._without_w.popleft()
            return Op("W", done.stage, done.microbatch)
        kind, lane = name[0], int(name[1])
        op = Op(kind, self._stages[lane], next((self._forward if kind == "F" else self._backward)[lane]))
        if kind == "I":
            self._without_w.append(op)
        return op


@dataclass(frozen=True)
class Family:
    """A kind of schedule and what it asks for.

    Attributes:
        name: as in the config.
        placement: where the stages are, whatever the number of micro-batches.
        chunks: stages on each rank; of the interleaved schedule the least.
        make: the generator, called with ranks, micro-batches and chunks.
        splits: whether some backwards are cut into I and W.
        pairs: whether it has F&B pairs.
        per_rank: how many micro-batches it needs for each rank; 0 where any number will do.
        fallback: a family with the same placement for fewer micro-batches.
    """

    name: str
    placement: PlacementName
    chunks: int
    make: Callable[[int, int, int], Schedule]
    splits: bool = False
    pairs: bool = False
    per_rank: int = 0
    fallback: Family | None = None

    def obstacle(self, ranks: int, microbatches: int) -> str:
        """Why it cannot run, "" if it can."""
        if self.placement == "mirrored" and ranks % 2:
            return f"{self.name} needs an even number of ranks, not {ranks}"
        if microbatches < (least := max(self.per_rank * ranks, 1)):
            formula = f"{self.per_rank}P = " if self.per_rank else ""
            return f"{self.name} needs at least {formula}{least} micro-batches, there are {microbatches}"
        return ""

    def generate(self, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """The schedule.

        Raises:
            ValueError: there is an obstacle, or `chunks` is not a number of stages that it can place on a rank.
        """
        if self.name == "interleaved" and chunks < self.chunks:
            raise ValueError(f"interleaved needs at least {self.chunks} stages on each rank, not {chunks}")
        if self.name != "interleaved" and chunks != self.chunks:
            raise ValueError(f"{self.name} has {self.chunks} stage{'s' * (self.chunks > 1)} on each rank, not {chunks}")
        if obstacle := self.obstacle(ranks, microbatches):
            raise ValueError(obstacle)
        return self.make(ranks, microbatches, chunks)


def _whole(generate: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    return lambda ranks, microbatches, chunks: generate(ranks, microbatches)


_ZB_V = Family("zb-v", "v", 2, _whole(zb_v), splits=True)

SCHEDULES: dict[str, Family] = {family.name: family for family in (
    Family("gpipe", "looped", 1, _whole(gpipe)),
    Family("1f1b", "looped", 1, _whole(one_f_one_b)),
    Family("interleaved", "looped", 2, interleaved),
    Family("zb-h1", "looped", 1, _whole(zb_h1), splits=True),
    _ZB_V,
    Family("dualpipev", "v", 2, _whole(dualpipev), splits=True, pairs=True, per_rank=2, fallback=_ZB_V),
    Family("dualpipe", "mirrored", 2, _whole(dualpipe), splits=True, pairs=True, per_rank=2,
           fallback=Family("mirrored-zb-v", "mirrored", 2, _whole(mirrored_zb_v), splits=True)),
)}
"""All kinds of schedules by name."""


def fitting(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[Schedule, str]:
    """The schedule asked for, or its fallback where there are too few micro-batches for it.

    One rank has one stage: there, all but GPipe are 1F1B.

    Args:
        name: of SCHEDULES.
        chunks: stages on each rank.
    Returns:
        The schedule, and why it is not the one asked for ("" if it is).
    Raises:
        ValueError: neither can run with these numbers.
    """
    family = SCHEDULES[name]
    if ranks == 1 and family.name not in ("gpipe", "1f1b"):
        return SCHEDULES["1f1b"].generate(ranks, microbatches, chunks), "one rank has one stage"
    reason = family.obstacle(ranks, microbatches)
    if reason and family.fallback and not family.fallback.obstacle(ranks, microbatches):
        fallback = family.fallback
        return fallback.generate(ranks, microbatches, chunks), f"{reason}; {fallback.name} takes its place"
    return family.generate(ranks, microbatches, chunks), ""
