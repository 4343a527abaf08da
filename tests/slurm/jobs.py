"""A run of the tiny MoE config as a job of the throw-away Slurm: two trainer nodes, one of rollout ranks, one spare."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import Cluster, until
from good_config import good_tree, write_tree

ROOT = Path(__file__).resolve().parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A submitted job.

    Args:
        slurm: the cluster.
        files: folder with model and prompts.
        folder: of the run.
        steps: to train.
        overrides: further words of the command line.
        fake: run tests/slurm/fake_ranks.py in place of the trainer.
        options: of sbatch; the nodes.
        environ: further settings of slurm/lib.sh.
    """

    def __init__(self, slurm: Cluster, files: Path, folder: Path, steps: int, *overrides: str, fake: bool = False,
                 options: Sequence[str] = ("--nodes=4",), **environ: str) -> None:
        tree = good_tree(files)
        tree["run"] = {"dir": str(folder / "run"), "steps": steps}
        tree["checkpoint"] = {"every": 2, "keep": 2, "export": True}
        tree["eval"] = {"every": 0, "before_start": False}
        tree["rollout"] |= {"no_engine_timeout_s": 60.0, "request_timeout_s": 20.0}
        tree["cluster"] |= {"lease_timeout_s": 20.0, "timeout_s": 60.0}
        self.slurm, self.run, self.output, self.fake = slurm, folder / "run", folder / "out", fake
        config = write_tree(folder, tree)
        settings = {"MEGARL_ROOT": str(ROOT), "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1", "GPUS_PER_NODE": "1",
                    "PREFLIGHT": "ping", "DEAD_S": "12", "PYTHONPATH": str(Path(__file__).parent),
                    **({"MEGARL_PROGRAM": "fake_ranks", "FAKE_STEPS": str(steps)} if fake else {}), **environ}
        self.number = slurm.submit(*options, f"--output={self.output}", str(ROOT / "slurm" / "train_moe.sh"),
                                   str(config), *overrides, **settings)

    def step(self) -> int:
        """The last that is done."""
        if not self.fake:
            return max((line["step"] for line in self.metrics()), default=0)
        try:
            return json.loads((self.run / "heartbeat.json").read_text())["step"]
        except FileNotFoundError:
            return 0

    def metrics(self) -> list[dict[str, Any]]:
        """Of each step so far."""
        with suppress(FileNotFoundError):
            text = (self.run / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        return []

    def told(self) -> str:
        """The job's output, of all its lives."""
        return self.output.read_text() if self.output.exists() else ""

    def reach(self, step: int, timeout_s: float = 120.0) -> None:
        """Wait until so many steps are done."""
        def done() -> bool:
            state = self.slurm.job(self.number)["JobState"]
            assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), state
            return self.step() >= step

        self.until(done, f"step {step} was not reached", timeout_s)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """The condition's result once it is true; AssertionError with the job's output after the time."""
        try:
            return until(condition, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.told()[-5000:]}") from None

    def requeued(self, restarts: int) -> None:
        """Wait until it is in the queue again; start it at once: Slurm waits two minutes otherwise."""
        self.until(lambda: (found := self.slurm.job(self.number))["Restarts"] == str(restarts)
                   and found["JobState"] == "PENDING", "it was not requeued")
        time.sleep(3.0)  # a node refuses a job that it has ended in the same second
        self.slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait(self, timeout_s: float) -> tuple[str, str, str]:
        """Until it is over; (state, exit code, restarts)."""
        found = self.until(lambda: (job := self.slurm.job(self.number))["JobState"] in ENDED and job,
                           "it has not ended", timeout_s)
        return found["JobState"], found["ExitCode"], found["Restarts"]

    def cancel(self) -> None:
        """End it, and wait until its nodes are free."""
        if self.slurm.job(self.number)["JobState"] not in ENDED:
            self.slurm.call("scancel", self.number)
        self.wait(60.0)
        until(lambda: not self.slurm.call("squeue", "-h", "-j", self.number), "its nodes are not free", 60.0)

    def kill(self, node: str) -> None:
        """Kill -9 what it runs on a node: launchers, torchrun, ranks, engines."""
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environ = entry.read_bytes().split(b"\0")
                mine = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={self.number}".encode()} <= set(environ)
                if mine and b"slurmstepd" not in (entry.parent / "cmdline").read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
