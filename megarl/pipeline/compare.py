"""A table of all schedules side by side, for given numbers of ranks and micro-batches and given costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.pipeline.choose import model_costs
from megarl.pipeline.generators import SCHEDULES, fitting
from megarl.pipeline.order import order
from megarl.pipeline.simulate import Costs, Timeline, simulate


def predicted(name: str, ranks: int, chunks: int, weights: Sequence[float], ratio: Sequence[float], hop: float = 0.0,
              hidden: float = 0.0, ordered: bool = False) -> tuple[Timeline, str]:
    """The timeline of a schedule.

    Args:
        name: in SCHEDULES.
        chunks: stages a rank, for interleaved; the others have their own number.
        weights, ratio, hop, hidden: as in `choose.model_costs`.
        ordered: whether the micro-batches are put in the order of `order` first; the timeline then has them by place.
    Returns:
        The timeline, and why it is not that of the schedule asked for ("" if it is).
    Raises:
        ValueError: neither it nor its fallback can run with these numbers.
    """
    chunks = (chunks if name == "interleaved" else SCHEDULES[name].chunks) if ranks > 1 else 1
    schedule, instead = fitting(name, ranks, len(weights), chunks)
    costs: Costs = model_costs(ranks, schedule.stages, weights, ratio, hop, hidden)
    if ordered:
        costs = costs.reordered(order(costs, name, ranks, chunks))
    return simulate(schedule, costs), instead


def table(ranks: int, chunks: int, weights: Sequence[float], ratio: Sequence[float], hop: float = 0.0,
          hidden: float = 0.0) -> str:
    """One line a schedule, as Markdown; arguments as in `predicted`.

    Columns: makespan and bubble as the micro-batches come and, if they differ, in the order of `order`; the largest
    peak of a rank in micro-batches' activations of 1/P of the model; parameter copies.
    """
    unequal = len(set(weights)) > 1
    ordered = ["ordered", "bubble %"] if unequal else []
    head = ["schedule", "makespan", "bubble %", *ordered, "memory", "copies", "note"]
    rows = []
    for name in SCHEDULES:
        try:
            line, note = predicted(name, ranks, chunks, weights, ratio, hop, hidden)
            lines = [line, predicted(name, ranks, chunks, weights, ratio, hop, hidden, True)[0]] if unequal else [line]
        except ValueError as error:
            rows.append([name, *["-"] * (len(head) - 2), str(error)])
            continue
        prices = [text for one in lines for text in (f"{one.makespan:.6g}", f"{100 * one.bubble_fraction:.1f}")]
        rows.append([name, *prices, f"{max(line.peak_memory):g}", str(line.schedule.copies), note])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines_ = [head, ["-" * width for width in widths], *rows]
    return "".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |\n"
                   for row in lines_)
