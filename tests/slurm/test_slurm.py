"""The job script on a real Slurm: trains, stops before the limit, resumes, and outlives lost nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, until
from jobs import ROOT, Job


def test_trains_stops_when_asked_and_goes_on(slurm: Cluster, files: Path, tmp_path: Path) -> None:
    """USR1, as before the time limit: saved and requeued; the second life ends the run, without a gap or a double."""
    job = Job(slurm, files, tmp_path, 24)
    job.reach(3)
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    until(lambda: slurm.job(job.number)["Restarts"] == "1", f"not requeued:\n{job.told()}", 60.0)
    saved = max(int(path.name[5:]) for path in (job.run / "checkpoints").glob("step_*"))
    assert saved == job.metrics()[-1]["step"] < 24  # the step that it was in, not the last of every second
    slurm.call("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # Slurm waits two minutes otherwise
    ended = job.wait(120.0)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.told()
    assert [line["step"] for line in job.metrics()] == list(range(1, 25))
    assert f"step_{saved:08d}" in re.search(r"resumed +(/.*)", job.told())[1]
    assert (job.run / "export" / "config.json").exists() and list((job.run / "export").glob("*.safetensors"))
    logs = {path.name for path in (job.run / "logs").glob(f"{job.number}.*.1")}
    assert logs == {f"{job.number}.0.1", f"{job.number}.1.1"}  # of each life
    for node in ("trainers0", "trainers1", "rollouts0"):
        assert (job.run / "logs" / f"{job.number}.0.1" / node / "torchrun.log").exists()
    # what only the ranks find out is a mistake, too: no other launch, no other life
    again = Job(slurm, files, tmp_path, 24, "checkpoint.resume=false")
    ended = again.wait(120.0)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "64:0", "0"), again.told()
    assert "checkpoint.resume" in again.told() and f"life {again.number}.0.2" not in again.told()


def test_a_mistake_ends_the_job_at_once(slurm: Cluster, files: Path, tmp_path: Path) -> None:
    job = Job(slurm, files, tmp_path, 24, "rollout.sample_per_prompt=8")
    ended = job.wait(60.0)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "64:0", "0")
    assert job.told().count("error: ") == 1 + job.told().count("srun: error: ") and "samples_per_prompt" in job.told()
    assert not job.run.exists()


def test_lost_nodes(slurm: Cluster, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First what runs on the rollout node dies, then a trainer node loses its power."""
    job = Job(slurm, files, tmp_path, 10_000)
    job.reach(3)
    kill_processes(job, "n3")
    until(lambda: "rollout node 0 starts again on n3" in job.told(), f"no new start:\n{job.told()}", 60.0)
    at = job.metrics()[-1]["step"]
    back_s = job.reach(at + 5)
    assert f"life {job.number}.0.2" not in job.told() and job.told().count("resumed ") == 1  # the trainers went on
    assert [line["step"] for line in job.metrics()] == list(range(1, len(job.metrics()) + 1))

    begun, at = time.monotonic(), job.metrics()[-1]["step"]
    slurm.cut_power("n2")
    until(lambda: "resumed " in job.told().partition(f"life {job.number}.0.2")[2], f"no resume:\n{job.told()}", 120.0)
    first = len(job.metrics())
    until(lambda: len(job.metrics()) > first, f"no step:\n{job.told()}", 60.0)
    seconds = time.monotonic() - begun
    assert "trainers on n1 n3; rollout ranks on n4" in job.told()
    assert "node n2: no sign of life" in (job.run / "bad_nodes").read_text()
    steps = [line["step"] for line in job.metrics()]
    assert steps == list(range(1, len(steps) + 1)) and steps[-1] > at - 3
    assert slurm.job(job.number)["Restarts"] == "0"
    job.cancel()
    slurm.boot("n2")
    with capsys.disabled():
        print(f"\nrollout node's processes killed: five more steps after {back_s:.0f} s; trainer node without power: "
              f"first step on the spare after {seconds:.0f} s, of which {12} s are DEAD_S")


def kill_processes(job: Job, node: str) -> None:
    """Kill -9 what the job runs on a node: launcher, torchrun, supervisor, engines."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            environ = entry.read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in environ and f"SLURM_JOB_ID={job.number}".encode() in environ:
                if b"slurmstepd" not in (entry.parent / "cmdline").read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


def test_dry_run_writes_nothing(files: Path, tmp_path: Path) -> None:
    """Needs no Slurm; what it prints is what a job would run."""
    from good_config import good_tree, write_tree

    tree = good_tree(files)
    tree["run"] = {"dir": str(tmp_path / "run")}
    config = write_tree(tmp_path, tree)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(["bash", str(ROOT / "slurm" / "train_moe.sh"), str(config)], capture_output=True, text=True,
                          env={**os.environ, "DRY": "1", "NODES": "a b c d", "GPUS_PER_NODE": "1",
                               "MEGARL_VENV": os.path.dirname(os.path.dirname(os.sys.executable))})
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert [re.search(r"--job-name=(\w+)", line)[1] for line in commands if "srun" in line] == [
        "preflight", "trainers", "rollouts0"]
    assert "--nodelist=a\\,b" in commands[-2] and "NPROC_PER_NODE=1\\,1" in commands[-2]
    assert sorted(tmp_path.rglob("*")) == before
