"""The measured timeline of one step: its file, what it says about a schedule, and Chrome's trace format. Pure.

The file has one JSON object a line, in any order:

    {"rank": 0, "item": {"kind": "F", "stage": 0, "microbatch": 3}, "start": 0.0125, "end": 0.0518}
    {"rank": 0, "item": {"kind": "FB", "stage": 0, "microbatch": 9, "stage2": 7, "microbatch2": 2}, "start": ...}

`rank` is the pipeline rank; `kind` F, B, I, W, or FB for a pair, whose backward is (stage2, microbatch2); `start` and
`end` are seconds since the step's begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserMistake
from megarl.pipeline.check import check
from megarl.pipeline.schedule import Item, Op, Pair, Schedule, parts
from megarl.pipeline.simulate import Costs, Timeline, peak_live


@dataclass(frozen=True, slots=True)
class Span:
    """One item as a rank ran it; seconds since the step's begin."""

    rank: int
    item: Item
    start: float
    end: float


def write(path: Path | str, rows: Iterable[Span]) -> None:
    """Write one step's file; an existing one is replaced."""
    lines = [json.dumps({"rank": span.rank, "item": _to_dict(span.item), "start": round(span.start, 9),
                         "end": round(span.end, 9)}) for span in rows]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read(path: Path | str) -> Timeline:
    """Read one step's file as the timeline of the schedule that was run (named "measured").

    Raises:
        UserMistake: no such file; a line that is not as described above; operations that overlap on a rank, are
            doubled, or belong to no complete set of stages and micro-batches.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserMistake(f"cannot be read: {error}", str(path), "give the trace of one step") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(_to_span(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserMistake(f"not a row of a trace: {type(error).__name__}: {error}", f"{path} line {number}",
                              'a row is {"rank", "item": {"kind", "stage", "microbatch"}, "start", "end"}') from None
    try:
        return timeline(found)
    except ValueError as error:
        raise UserMistake(str(error), str(path), "give the rows of all ranks of one step") from None


def spans(line: Timeline) -> list[Span]:
    """A timeline, measured or simulated, as rows of a trace."""
    return [Span(rank, item, float(start), float(end)) for rank, items in enumerate(line.schedule.items)
            for item, start, end in zip(items, line.start[rank], line.end[rank], strict=True)]


def timeline(rows: Iterable[Span]) -> Timeline:
    """The timeline of one step's spans.

    Raises:
        ValueError: an operation is there twice or missing, items overlap on a rank, or their order is no schedule.
    """
    ordered = sorted(rows, key=lambda span: (span.rank, span.start, span.end))
    ops = [(op, span.rank) for span in ordered for op in parts(span.item)]
    if not ops:
        raise ValueError("there are no operations")
    if len({op for op, _ in ops}) < len(ops):
        seen: set[Op] = set()
        double = next(op for op, _ in ops if op in seen or seen.add(op))
        raise ValueError(f"{double} is there twice")
    ranks = 1 + max(span.rank for span in ordered)
    stages, microbatches = 1 + max(op.stage for op, _ in ops), 1 + max(op.microbatch for op, _ in ops)
    if max(ranks, stages, microbatches) > len(ops):
        raise ValueError(f"{len(ops)} operations are too few for {ranks} ranks, {stages} stages and {microbatches} "
                         "micro-batches")
    for what, count, found in (("rank", ranks, {rank for _, rank in ops}), ("stage", stages, {o.stage for o, _ in ops}),
                               ("micro-batch", microbatches, {o.microbatch for o, _ in ops})):
        if missing := sorted(set(range(count)) - found):
            raise ValueError(f"{what} {missing[0]} of {count} has no operation")
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.rank == after.rank and after.start < before.end:
            raise ValueError(f"rank {before.rank} runs {before.item} and {after.item} at the same time")
    lists = [[span for span in ordered if span.rank == rank] for rank in range(ranks)]
    holders = [{rank for op, rank in ops if op.stage == stage} for stage in range(stages)]
    where = tuple(tuple(sorted(found, key=lambda rank: (rank != stage, rank)))
                  for stage, found in enumerate(holders))
    schedule = Schedule("measured", microbatches, where, tuple(tuple(s.item for s in one) for one in lists))
    check(schedule)
    return Timeline(schedule, tuple(np.array([s.start for s in one]) for one in lists),
                    tuple(np.array([s.end for s in one]) for one in lists), peak_live(schedule))


def costs(line: Timeline, hop: float = 0.0) -> Costs:
    """The costs with which the simulator gives every item the time that it took.

    A pair's time is given in halves to its two operations, a B's to input and weight gradient: each is there once.
    """
    shape = (line.schedule.stages, line.schedule.microbatches)
    seconds = {kind: np.zeros(shape) for kind in "FIW"}
    for span in spans(line):
        share = (span.end - span.start) / len(parts(span.item))
        for op in parts(span.item):
            for kind in "IW" if op.kind == "B" else op.kind:
                seconds[kind][op.stage, op.microbatch] = share / 2 if op.kind == "B" else share
    return Costs(*seconds.values(), np.zeros(shape), np.full(shape[1], hop))


def chrome(lines: dict[str, Timeline]) -> str:
    """JSON for chrome://tracing and ui.perfetto.dev; each timeline is a process, each rank a thread."""
    events: list[dict[str, Any]] = []
    for pid, (name, line) in enumerate(lines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}
                   for rank in range(line.schedule.ranks)]
        for span in spans(line):
            kinds = "&".join(op.kind for op in parts(span.item))
            numbers = "&".join(str(op.microbatch) for op in parts(span.item))
            events.append({"ph": "X", "name": f"{kinds} {numbers}", "cat": kinds, "pid": pid, "tid": span.rank,
                           "ts": round(span.start * 1e6, 3), "dur": round((span.end - span.start) * 1e6, 3),
                           "args": _to_dict(span.item)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _to_dict(item: Item) -> dict[str, Any]:
    if isinstance(item, Pair):
        return {"kind": "FB", "stage": item.forward.stage, "microbatch": item.forward.microbatch,
                "stage2": item.backward.stage, "microbatch2": item.backward.microbatch}
    return {"kind": item.kind, "stage": item.stage, "microbatch": item.microbatch}


def _to_span(row: dict[str, Any]) -> Span:
    item = row["item"]
    kind, numbers = item["kind"], [item["stage"], item["microbatch"], row["rank"]]
    if kind not in ("F", "B", "I", "W", "FB"):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "FB":
        numbers += [item["stage2"], item["microbatch2"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("stage, microbatch and rank are integers from 0")
    start, end = float(row["start"]), float(row["end"])
    if not (np.isfinite((start, end)).all() and 0 <= start <= end):
        raise ValueError(f"it starts at {start} and ends at {end}")
    made = (Pair(Op("F", *numbers[:2]), Op("B", *numbers[3:])) if kind == "FB" else Op(kind, *numbers[:2]))
    return Span(row["rank"], made, start, end)
