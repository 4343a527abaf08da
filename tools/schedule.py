"""Draw and compare pipeline schedules, and the measured timeline of a step, without starting anything.

    python tools/schedule.py draw zb-v --ranks 8 --microbatches 20 --out zb-v.svg
    python tools/schedule.py draw --trace runs/mine/traces/step_00000007_update_13.jsonl --out step.html
    python tools/schedule.py compare --ranks 8 --lengths 900,812,655,4096,120,77,3000,512 --hop 0.1
    python tools/schedule.py trace dualpipev --ranks 4 --microbatches 12 --out trace.json

F, I and W (--costs) are times of 1/P of the model for a micro-batch of mean length; a full backward takes I + W. With
--trace, the prediction has the measured time of each operation, so that what differs is waiting: it shows what the
messages cost, or, with another NAME for the same stages, what that schedule would have taken.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from megarl.errors import UserMistake, run_main
from megarl.pipeline import draw, trace
from megarl.pipeline.compare import predicted, table
from megarl.pipeline.generators import SCHEDULES, fitting
from megarl.pipeline.simulate import Timeline, simulate


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are told in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserMistake(message, "command line", f"see {self.prog} --help")


def number(text: str) -> float:
    """A finite number of at least 0."""
    if not (math.isfinite(value := float(text)) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    if (value := number(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share between 0 and 1")
    return value


def count(text: str) -> int:
    """An integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def three(text: str) -> tuple[float, ...]:
    """F,I,W."""
    if not all(word.replace(".", "", 1).isdigit() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is not three numbers F,I,W above 0")
    if len(values := tuple(map(number, text.split(",")))) != 3 or not all(values):
        raise argparse.ArgumentTypeError(f"{text} is not three numbers F,I,W above 0")
    return values


def lengths(text: str) -> list[float]:
    """Numbers, separated by commas, or a file with one a line."""
    try:
        words = text.split(",") if "," in text or text.isdigit() else Path(text).read_text().split()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is neither numbers nor a file that can be read: {error}") from None
    try:
        values = [number(word) for word in words]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a length: {error}") from None
    if not all(0 < value < 1e12 for value in values) or not values:
        raise argparse.ArgumentTypeError("there are none, or one is 0 or above 1e12")
    return values


def parser() -> Parser:
    """The command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--ranks", type=count, help="P, pipeline ranks")
    shared.add_argument("--microbatches", type=count, help="M, micro-batches of equal length")
    shared.add_argument("--lengths", type=lengths, help="tokens of each micro-batch: 900,412,... or a file, one a line")
    shared.add_argument("--chunks", type=count, default=2, help="stages a rank, for interleaved (default 2)")
    shared.add_argument("--costs", type=three, default=(1.0, 1.0, 1.0), metavar="F,I,W", help="default 1,1,1")
    shared.add_argument("--hop", type=number, default=0.0, help="time of a transfer, in the unit of --costs")
    shared.add_argument("--hidden", type=share, default=0.0, help="share of F and of I that a pair hides")
    top = Parser(prog="tools/schedule.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("compare", parents=[shared], help="a table of all schedules")
    for name, text in (("draw", "SVG, or HTML with tooltips and a zoom"), ("trace", "JSON for ui.perfetto.dev")):
        command = commands.add_parser(name, parents=[shared], help=text)
        command.add_argument("name", nargs="?", metavar="NAME", choices=list(SCHEDULES), help=", ".join(SCHEDULES))
        command.add_argument("--ordered", action="store_true", help="order the micro-batches as the trainer does")
        command.add_argument("--trace", metavar="FILE", help="a measured step (observe.trace_steps)")
        command.add_argument("--out", required=True, type=Path, help="file to write")
    return top


def weights(options: argparse.Namespace) -> list[float]:
    """Relative lengths of the micro-batches, 1 on average."""
    if options.ranks is None or (options.microbatches is None) == (options.lengths is None):
        raise UserMistake("--ranks and one of --microbatches and --lengths are needed", "command line")
    sizes = options.lengths or [1.0] * options.microbatches
    return [size * len(sizes) / math.fsum(sizes) for size in sizes]


def timelines(options: argparse.Namespace) -> dict[str, Timeline]:
    """What `draw` and `trace` show, by title."""
    if options.trace is None:
        if options.name is None:
            raise UserMistake("give the NAME of a schedule, or --trace", "command line", f"one of {list(SCHEDULES)}")
        line, instead = predicted(options.name, options.ranks or 0, options.chunks, weights(options), options.costs,
                                  options.hop, options.hidden, options.ordered)
        return {line.schedule.name + (f" ({instead})" if instead else ""): line}
    if options.ranks or options.microbatches or options.lengths or options.ordered:
        raise UserMistake("--trace says the ranks, the micro-batches and their order itself", "command line",
                          "leave out --ranks, --microbatches, --lengths and --ordered")
    measured = trace.read(options.trace)
    schedule = measured.schedule
    if options.name is not None:
        chunks = schedule.stages * schedule.copies // schedule.ranks
        schedule, _ = fitting(options.name, schedule.ranks, schedule.microbatches, chunks)
        if schedule.placement != measured.schedule.placement:
            raise UserMistake(f"{options.name} has its stages elsewhere than the measured step", options.trace)
    title = f"predicted: {options.name or 'the same operations'}, each in its measured time"
    return {title: simulate(schedule, trace.costs(measured, options.hop)), "measured": measured}


def main(argv: list[str]) -> None:
    """Run one command; mistakes are raised as UserMistake."""
    options = parser().parse_args(argv)
    try:
        if options.command == "compare":
            print(table(options.ranks or 0, options.chunks, weights(options), options.costs, options.hop,
                        options.hidden), end="")
            return
        lines = timelines(options)
    except ValueError as error:  # the schedules' own refusals
        raise UserMistake(str(error), "command line") from None
    unit = "s" if options.trace else ""
    if options.command == "trace":
        text = trace.chrome(lines)
    else:
        text = draw.html(lines, unit) if options.out.suffix == ".html" else draw.svg(lines, unit)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserMistake(f"cannot be written: {error.strerror}", str(options.out)) from None
    print(f"{options.out}: " + "; ".join(f"{name}: makespan {line.makespan:.6g}{unit and ' s'}, bubble "
                                         f"{100 * line.bubble_fraction:.1f} %" for name, line in lines.items()))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
