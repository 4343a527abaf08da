"""Make the tasks with tools: prompts, tokenizer and a warm-started tiny model. Does nothing if it is there already.

    python tools/make_tool_tasks.py --out runs/tool-tasks
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path


def main() -> None:
    """Parse the arguments, show a progress bar."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from transformers.utils import logging

    from megarl.examples.tool_tasks import Options, make

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    for option in fields(Options):
        if option.name != "recipe":
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default,
                                help=f"default {option.default}")
    arguments = vars(parser.parse_args())
    out, options = arguments.pop("out"), Options(**arguments)
    torch.set_num_threads(1)  # the matrices are too small to share, and the result depends on it
    logging.disable_progress_bar()
    with Progress(TextColumn("warm start"), BarColumn(), TextColumn("step {task.completed}/{task.total}"),
                  TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=options.steps, loss=float("nan"))
        report = make(out, options, lambda step, loss: progress.update(bar, completed=step, loss=loss))
        progress.update(bar, visible=False)
    print(f"{out}: {report['parameters']:,} parameters, loss {report['loss']:.3f}")


if __name__ == "__main__":
    main()
