"""The command line of what makes a task: an option for each field of its Options, and a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging


def run(description: str, kind: type, make: Callable[..., dict[str, Any]], told: str) -> None:
    """Parse the arguments, make the task, print what came out.

    Args:
        description: of the program.
        kind: a dataclass of options; `recipe` is not the user's.
        make: `(folder, options, progress) -> report`, as `warm_start.make`.
        told: of the report, in the form of `str.format`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    for option in fields(kind):
        if option.name != "recipe":
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default,
                                help=f"default {option.default}")
    arguments = vars(parser.parse_args())
    out, options = arguments.pop("out"), kind(**arguments)
    torch.set_num_threads(1)  # the matrices are too small to share, and the result depends on it
    logging.disable_progress_bar()
    with Progress(TextColumn("warm start"), BarColumn(), TextColumn("step {task.completed}/{task.total}"),
                  TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=options.steps, loss=float("nan"))
        report = make(out, options, lambda step, loss: progress.update(bar, completed=step, loss=loss))
        progress.update(bar, visible=False)
    print(f"{out}: {told.format(**report)}")
