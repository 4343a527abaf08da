"""A sign of life in the run directory, for whoever watches the run from outside (a batch script, say)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

LEAST_S = 1.0


class Heartbeat:
    """Keeps `run_dir/heartbeat.json` young: {"step": finished steps, "phase": ..., "time": seconds since 1970}.

    It is written by the main thread where it makes progress, so it grows old if that hangs; no phase of a healthy run
    writes it more rarely than it lasts. The last phase is "finished" or, with steps left to do, "stopped".

    Args:
        run_dir: where; None: nothing is written.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._path = run_dir and run_dir / "heartbeat.json"
        self._written = float("-inf")
        self.step, self.phase = 0, "start"

    def beat(self, phase: str | None = None) -> None:
        """Say that the run is alive, at most once a second; at once if it enters another phase."""
        if self._path is None or (phase in (None, self.phase) and time.monotonic() - self._written < LEAST_S):
            return
        self.phase, self._written = phase or self.phase, time.monotonic()
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"step": self.step, "phase": self.phase, "time": time.time()}))
        os.replace(partial, self._path)
