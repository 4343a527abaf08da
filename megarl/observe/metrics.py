"""Numbers of each step, to metrics.jsonl and TensorBoard, once per step also over a resume."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.cluster import device
from megarl.config.schema import ObserveConfig


class MetricWriter:
    """Writes one record per step on one rank.

    Args:
        run_dir: metrics.jsonl and tensorboard/ go there.
        observe: which of the two are written.
        first_step: the step this life begins with; records of it and later ones, left by a life that got further than
            its last checkpoint, are removed, so that no step is there twice.
    """

    def __init__(self, run_dir: Path, observe: ObserveConfig, first_step: int) -> None:
        self._file, self._board = None, None
        if observe.jsonl:
            path = run_dir / "metrics.jsonl"
            kept = [line for line in read_lines(path) if line["step"] < first_step]
            rewritten = path.with_suffix(".partial")
            rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(rewritten, path)  # a kill here leaves the old file or the new one
            self._file = path.open("a", encoding="utf-8")
        if observe.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record `values` (names like "reward/mean") for `step`; a value that is not finite is written as null."""
        if self._file:
            record = {"step": step, "time": time.time(),
                      **{name: value if math.isfinite(value) else None for name, value in values.items()}}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        """Flush and close both."""
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()


def read_lines(path: Path) -> list[dict]:
    """The records of a metrics.jsonl ([] if there is none); a line cut short by a kill is dropped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Phases:
    """Seconds per phase of a step, on this rank.

    Args:
        entered: called with the name of each phase that begins.

    >>> phases = Phases()
    >>> with phases("rollout"): ...
    """

    def __init__(self, entered: Callable[[str], None] = lambda name: None) -> None:
        self._entered = entered
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._entered(name)
        start = time.perf_counter()
        try:
            yield
            device.synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The phases since the last call as `seconds/<phase>`, and forget them."""
        values = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return values
