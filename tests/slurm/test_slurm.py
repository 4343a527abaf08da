"""The job script on a real Slurm: trains, stops before the limit, resumes, and outlives lost nodes.

Most tests run ranks that count instead of training (fake_ranks.py): what is tested is the script, the launcher and
Slurm. tests/bench/slurm.py does the same with the tiny MoE config, and measures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs import ROOT, Job


@pytest.fixture
def submit(slurm: Cluster, files: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`submit(steps, overrides..., SETTING=value...)` -> a job of fake ranks; it is cancelled at the end."""
    jobs = []

    def make(steps: int, *overrides: str, **settings: Any) -> Job:
        jobs.append(Job(slurm, files, tmp_path, steps, *overrides, fake=True, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.cancel()


def test_trains_and_exports(slurm: Cluster, files: Path, tmp_path: Path) -> None:
    """The real thing, with partitions apart."""
    job = Job(slurm, files, tmp_path, 4)
    assert job.wait(180.0) == ("COMPLETED", "0:0", "0"), job.told()
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]
    assert (job.run / "export" / "config.json").exists() and list((job.run / "export").glob("*.safetensors"))
    for node in ("trainers0", "trainers1", "rollouts0"):
        assert (job.run / "logs" / f"{job.number}.0.1" / node / "torchrun.log").exists()


def test_stops_when_asked_and_goes_on(slurm: Cluster, submit: Callable[..., Job]) -> None:
    """USR1, as before the time limit: saved and requeued; the second life begins where the first ended."""
    job = submit(60)
    job.reach(12)
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.requeued(1)
    saved = int((job.run / "saved.json").read_text())
    assert saved == job.step() < 60
    assert job.wait(60.0) == ("COMPLETED", "0:0", "1"), job.told()
    assert re.findall(r"starts after step (\d+)", job.told()) == ["0", str(saved)]
    assert job.step() == 60 and not (job.run / "STOP").exists()
    assert {path.name for path in (job.run / "logs").glob("*.1")} == {f"{job.number}.0.1", f"{job.number}.1.1"}


@pytest.mark.parametrize("override, told", [("rollout.sample_per_prompt=8", "samples_per_prompt"),
                                            ("rollout.samples_per_prompt=8", "some.key: 7 is too much")])
def test_a_mistake_ends_the_job_at_once(submit: Callable[..., Job], override: str, told: str) -> None:
    """Found by the check, or by a rank: told once, no other launch, no other life."""
    job = submit(60, override, FAKE="mistake")
    assert job.wait(60.0) == ("FAILED", "64:0", "0"), job.told()
    assert len(re.findall("^error: (?!see node 0)", job.told(), re.MULTILINE)) == 1 and told in job.told()
    assert f"life {job.number}.0.2" not in job.told()
    assert job.run.exists() == ("some.key" in told)


PREFLIGHT = """
import os, sys, time
if os.environ["NODE_RANK"] == "0":
    assert sys.argv[-2:] == ["--disk-mbps", "7"]
    open(sys.argv[sys.argv.index("--bad") + 1], "w").write("n2 is slow; very\\n")
    sys.exit(75)
time.sleep(60)
"""


def test_bad_nodes_are_left_out(submit: Callable[..., Job], tmp_path: Path) -> None:
    """What the preflight (here a stand-in) finds fault with is listed, and its place taken by the spare."""
    root = tmp_path / "root"
    (root / "tools").mkdir(parents=True)
    (root / "tools" / "preflight.py").write_text(PREFLIGHT)
    for name in ("slurm", "launch", "megarl"):
        (root / name).symlink_to(ROOT / name)
    job = submit(5, MEGARL_ROOT=str(root), PREFLIGHT="full", PREFLIGHT_ARGS="--disk-mbps 7")
    assert job.wait(90.0) == ("COMPLETED", "0:0", "0"), job.told()
    assert "trainers on n1 n3; rollout ranks on n4; spare: none" in job.told()
    listed = (job.run / "bad_nodes").read_text()
    assert re.fullmatch(rf"[-\d]+ [:\d]+ job {job.number} node n2: is slow; very\n", listed)


def test_failing_launches_are_bounded(submit: Callable[..., Job]) -> None:
    """A rank that dies early in each life: RETRIES launches more, then the end, which is no mistake's."""
    job = submit(60, FAKE="bug", RETRIES="1")
    assert job.wait(120.0) == ("FAILED", "75:0", "0"), job.told()
    assert "2 launches in a row have failed" in job.told() and f"life {job.number}.0.3" not in job.told()


def test_restarts_without_a_checkpoint_are_bounded(slurm: Cluster, submit: Callable[..., Job]) -> None:
    """A run that cannot save before its time is up does the same steps in every life; further ones are no progress."""
    job = submit(1 << 30, FAKE="unsaved", RETRIES="1", STOP_S="2")
    for life in range(2):
        job.until(lambda life=life: job.told().count("starts after step 0") == life + 1, "no new life")
        job.until(lambda life=life: 5 + 10 * life <= job.step() < 60, "it does not count")
        slurm.call("scancel", "--batch", "--signal=USR1", job.number)
        if not life:
            job.requeued(1)
    assert job.wait(60.0) == ("FAILED", "75:0", "1"), job.told()
    assert "no checkpoint was written since the last restart: not requeued" in job.told()


def test_a_stop_by_hand_outlasts_a_failed_launch(submit: Callable[..., Job]) -> None:
    """The trainers hang and are ended before they see the file."""
    job = submit(60, FAKE="hang", HANG_S="10")
    job.reach(5)
    (job.run / "STOP").touch()
    assert job.wait(60.0) == ("COMPLETED", "0:0", "0"), job.told()
    assert "no sign of progress for 10 s" in job.told() and job.told().count("starts after step") == 1


def test_asked_to_stop_before_the_start(slurm: Cluster, submit: Callable[..., Job], tmp_path: Path) -> None:
    """Slurm sends USR1 soon where the time limit is shorter than --signal's: the script still makes its plan."""
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "sitecustomize.py").write_text(  # of the plan's Python
        f"import pathlib, time\nhold = pathlib.Path({str(hold)!r})\nhold.with_name('held').touch()\n"
        "while hold.exists():\n    time.sleep(0.05)\n")
    job = submit(60, RETRIES="0", PYTHONPATH=str(tmp_path))
    job.until((tmp_path / "held").exists, "the plan does not begin")
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    time.sleep(2.0)  # until the node has it
    hold.unlink()
    assert job.wait(60.0) == ("FAILED", "75:0", "0"), job.told()
    assert "asked to stop before the start (a time limit shorter than --signal asks for?)" in job.told()


def test_a_job_that_may_not_be_requeued(slurm: Cluster, submit: Callable[..., Job]) -> None:
    """It saves, and ends well."""
    job = submit(1 << 30, options=("--nodes=4", "--no-requeue"))
    job.reach(5)
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait(60.0) == ("COMPLETED", "0:0", "0"), job.told()
    assert "the same command goes on from the newest checkpoint" in job.told()


def test_two_jobs_in_one_directory(slurm: Cluster, submit: Callable[..., Job], tmp_path: Path) -> None:
    """The second is told which the first is, and touches nothing."""
    first = slurm.submit("--nodes=1", "--output=/dev/null", "--wrap=sleep 600")
    try:
        (tmp_path / "run" / "logs").mkdir(parents=True)
        (tmp_path / "run" / "logs" / "job").write_text(f"{first}\n")
        (tmp_path / "run" / "STOP").touch()
        job = submit(5, options=("--nodes=3",))
        assert job.wait(60.0) == ("FAILED", "64:0", "0"), job.told()
        assert f"job {first} is using {job.run}" in job.told() and (job.run / "STOP").exists()
    finally:
        slurm.call("scancel", first)
    slurm.wait_idle()
    job = submit(5, options=("--nodes=3",))
    assert job.wait(60.0) == ("COMPLETED", "0:0", "0"), job.told()


def test_lost_nodes(slurm: Cluster, submit: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    """The rollout node's processes die: the trainers go on. A trainer node loses its power: on with the spare."""
    job = submit(1 << 30)
    job.reach(5)
    job.kill("n3")
    job.until(lambda: job.told().count("rank 2 has come") == 2, "the rollout rank did not come back")
    assert "rollout node 0 starts again on n3" in job.told() and job.told().count("starts after step") == 1
    at = job.step()
    job.reach(at + 5)

    begun, at = time.monotonic(), job.step()
    slurm.cut_power("n2")
    try:
        job.until(lambda: "starts after step" in job.told().partition(f"life {job.number}.0.2")[2], "no new life", 90.0)
        seconds, again = time.monotonic() - begun, int(re.findall(r"starts after step (\d+)", job.told())[-1])
        assert at - 5 <= again <= job.step() and again % 5 == 0  # the newest checkpoint
        assert "trainers on n1 n3; rollout ranks on n4; spare: none" in job.told()
        assert "node n2: no sign of life" in (job.run / "bad_nodes").read_text()
        assert slurm.job(job.number)["Restarts"] == "0"
        with capsys.disabled():
            print(f"\na trainer node without power: training again on the spare after {seconds:.0f} s (DEAD_S=12)")
    finally:
        job.cancel()
        slurm.boot("n2")
        slurm.wait_idle()


def test_the_batch_scripts_node_is_lost(slurm: Cluster, submit: Callable[..., Job]) -> None:
    """Nobody would look after the job any more: the guard on another node requeues it."""
    job = submit(1 << 30)
    job.reach(5)
    assert slurm.job(job.number)["BatchHost"] == "n1"
    slurm.cut_power("n1")
    try:
        job.until(lambda: slurm.job(job.number)["Restarts"] == "1", "it was not requeued", 90.0)
    finally:
        slurm.boot("n1")
    slurm.wait_idle()
    job.requeued(1)
    job.until(lambda: len(re.findall(r"starts after step (\d+)", job.told())) == 2, "no second life")


def test_dry_run_writes_nothing(files: Path, tmp_path: Path) -> None:
    """Needs no Slurm; what it prints is what a job would run."""
    from good_config import good_tree, write_tree

    tree = good_tree(files)
    tree["run"] = {"dir": str(tmp_path / "run")}
    config = write_tree(tmp_path, tree)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(["bash", str(ROOT / "slurm" / "train_moe.sh"), str(config)], capture_output=True, text=True,
                          env={**os.environ, "DRY": "1", "NODES": "a b c d", "GPUS_PER_NODE": "1",
                               "MEGARL_VENV": sys.prefix})
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert [re.search(r"--job-name=(\w+)", line)[1] for line in commands if "srun" in line] == [
        "preflight", "trainers", "rollouts0"]
    assert r"--nodelist=a\,b" in commands[-2] and r"NPROC_PER_NODE=1\,1" in commands[-2]
    assert sorted(tmp_path.rglob("*")) == before and "local.0.1:" in done.stdout

    (tmp_path / "run" / "logs" / "local.0.1").mkdir(parents=True)  # of an earlier call in the same allocation
    again = subprocess.run(done.args, capture_output=True, text=True, env={
        **os.environ, "DRY": "1", "NODES": "a b c d", "GPUS_PER_NODE": "1", "MEGARL_VENV": sys.prefix})
    assert "life local.0.2:" in again.stdout
