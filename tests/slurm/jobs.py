"""A run of the tiny MoE config as a job of the throw-away Slurm: two trainer nodes, one of rollout ranks, one spare."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import Cluster, until
from good_config import good_tree, write_tree

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """A submitted job.

    Args:
        slurm: the cluster.
        files: folder with model and prompts.
        folder: of the run.
        steps: to train.
        overrides: further words of the command line.
        environ: further settings of slurm/lib.sh.
    """

    def __init__(self, slurm: Cluster, files: Path, folder: Path, steps: int, *overrides: str, **environ: str) -> None:
        tree = good_tree(files)
        tree["run"] = {"dir": str(folder / "run"), "steps": steps}
        tree["checkpoint"] = {"every": 2, "keep": 2, "export": True}
        tree["eval"] = {"every": 0}
        tree["rollout"] |= {"no_engine_timeout_s": 60.0}
        tree["cluster"] |= {"lease_timeout_s": 8.0, "timeout_s": 60.0}
        self.slurm, self.run, self.output = slurm, folder / "run", folder / "out"
        config = write_tree(folder, tree)
        settings = {"MEGARL_ROOT": str(ROOT), "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1", "GPUS_PER_NODE": "1",
                    "PREFLIGHT": "ping", "DEAD_S": "12", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environ}
        self.number = slurm.submit("--nodes=4", f"--output={self.output}", str(ROOT / "slurm" / "train_moe.sh"),
                                   str(config), *overrides, **settings)

    def metrics(self) -> list[dict[str, Any]]:
        """Of each step so far."""
        with suppress(FileNotFoundError):
            text = (self.run / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        return []

    def told(self) -> str:
        """The job's output, of all its lives."""
        return self.output.read_text() if self.output.exists() else ""

    def reach(self, step: int, timeout_s: float = 120.0) -> float:
        """Wait until so many steps are done; seconds that it took."""
        begun = time.monotonic()

        def done() -> bool:
            state = self.slurm.job(self.number)["JobState"]
            assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), f"{state}:\n{self.told()}"
            return any(line["step"] >= step for line in self.metrics())

        try:
            until(done, f"step {step} was not reached", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.told()[-5000:]}") from None
        return time.monotonic() - begun

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Until it is over; its fields."""
        try:
            return self.slurm.wait(self.number, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.told()[-5000:]}") from None

    def cancel(self) -> None:
        """End it, and wait until its nodes are free."""
        self.slurm.call("scancel", self.number)
        self.wait(60.0)
        until(lambda: all(self.slurm.state(node) in ("idle", "down", "down*") for node in self.slurm.nodes),
              "the nodes are not free", 60.0)
