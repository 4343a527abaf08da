"""Say what a checkpoint is: of a run, converted, or a Hugging Face directory.

    python tools/inspect_checkpoint.py runs/mine                        # the newest one of a run
    python tools/inspect_checkpoint.py runs/mine/checkpoints/step_00000040 --tensors experts
    python tools/inspect_checkpoint.py models/qwen3 --checksums > a.txt  # equal lines: equal bits, in either format

    python tools/inspect_checkpoint.py runs/mine --check                # are the files as they were written?

Only the index is read, --checksums and --check apart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.checkpoint import inspect
from megarl.checkpoint.convert import refuse_damaged
from megarl.checkpoint.team import Team
from megarl.errors import run_main


def main(argv: list[str]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the directory of a run")
    parser.add_argument("--tensors", nargs="?", const="", metavar="TEXT", help="list tensors, those with TEXT in the "
                        "name")
    parser.add_argument("--checksums", action="store_true", help="print a checksum of each weight by its Hugging Face "
                        "name, and nothing else")
    parser.add_argument("--check", action="store_true", help="compare all files with the checksums that were noted "
                        "when they were written")
    arguments = parser.parse_args(argv)
    path = inspect.newest(arguments.checkpoint)
    if arguments.checksums:
        for name, checksum in inspect.checksums(path):
            print(name, checksum)
        return
    if arguments.check:
        count = refuse_damaged(path, Team())
        print(f"{path}: " + ("no checksums were noted" if count is None else f"all {count} files are as they were "
                             "written"))
        return
    width = None if sys.stdout.isatty() else 10_000  # in a pipe or a file nothing is cut
    summary, console = inspect.summarise(path), Console(soft_wrap=True, highlight=False, width=width)
    console.print(f"{path}: {summary.kind}")
    for name, value in summary.facts.items():
        console.print(f"  {name}: {value}", markup=False)
    uses, rows = inspect.sizes(summary)
    table = Table("part", *(use.replace(".", "\n") for use in uses))
    for part, row in rows.items():
        table.add_row(part, *(inspect.megabytes(row[use]) if use in row else "" for use in uses))
    table.add_section()
    table.add_row("all", *(inspect.megabytes(sum(row.get(use, 0) for row in rows.values())) for use in uses))
    console.print(table)
    if arguments.tensors is not None:
        listed = Table("tensor", "size", "dtype", "pieces", "bytes")
        for tensor in sorted(summary.tensors, key=lambda tensor: tensor.key):
            if arguments.tensors in tensor.key:
                listed.add_row(tensor.key, " x ".join(map(str, tensor.size)), str(tensor.dtype).removeprefix("torch."),
                               str(tensor.boxes), inspect.megabytes(tensor.bytes))
        console.print(listed)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
