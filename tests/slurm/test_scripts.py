"""Parts of the job scripts, alone: options of sbatch that reach each srun; Slurm's controller away for a while."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, until
from jobs import ENDED, ROOT

SOURCED = f"set -euo pipefail\nroot={ROOT}\nsource $root/slurm/lives.sh\n"


@pytest.fixture
def batch(slurm: Cluster, tmp_path: Path) -> Callable[..., list[str]]:
    """`batch(body, sbatch options...)` -> output of each of its tasks, once all are over."""
    def make(body: str, *options: str) -> list[str]:
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{SOURCED}{body}\n")
        number = slurm.submit("--ntasks-per-node=1", "--exclusive", f"--output={tmp_path}/out-%a", *options,
                              str(tmp_path / "job.sh"))
        states = lambda: slurm.call("squeue", "-h", "-r", "-t", "all", "-j", number, "-o", "%T").split()  # noqa: E731
        until(lambda: all(state in ENDED for state in states()), "it has not ended", 60.0)
        return [path.read_text() for path in sorted(tmp_path.glob("out-*"))]

    return make


def test_tasks_of_an_array_do_not_meet(batch: Callable[..., list[str]]) -> None:
    """The last one's number is that of the array; it must neither see the others' nodes nor end their steps."""
    told = batch("""begin
        echo "nodes: $(allocated | xargs)"
        start_step sleeper "$(allocated)" "" -- sleep 12
        sleep 5
        [ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ] || cancel KILL 10 sleeper
        reap sleeper && echo slept || echo ended""", "--array=1-3", "--nodes=1")
    assert len({text.partition("\n")[0] for text in told}) == 3 and all(
        text.partition("\n")[0] in ("nodes: n1", "nodes: n2", "nodes: n3", "nodes: n4") for text in told), told
    assert sorted(text.split()[-1] for text in told) == ["ended", "slept", "slept"], told


def test_options_of_sbatch_are_not_those_of_the_steps(batch: Callable[..., list[str]]) -> None:
    """--export=NONE would keep a step's variables from its tasks, --gpus=16 ask for the job's GPUs in each step."""
    told, = batch("""export PATH SLURM_GPUS=16 SLURM_NTASKS_PER_GPU=1
        begin
        for node in $(allocated); do
            start_step one "$node" "" MINE=here -- bash -c 'echo "$MINE on $SLURMD_NODENAME of $MEGARL_NODES"'
            reap one
        done""", "--export=NONE", "--nodes=2")
    nodes = [line.split()[2] for line in told.splitlines() if line.startswith("here on ")]
    assert len(nodes) == 2 and all(f"here on {node} of {node}\n" in told for node in nodes), told


def test_submitted_from_elsewhere(slurm: Cluster, tmp_path: Path) -> None:
    """One error, with the remedy."""
    number = slurm.submit("--nodes=1", f"--chdir={tmp_path}", f"--output={tmp_path}/out",
                          str(ROOT / "slurm" / "train_moe.sh"), "config.yaml", SLURM_SUBMIT_DIR=str(tmp_path),
                          PWD=str(tmp_path), MEGARL_ROOT=str(tmp_path))
    job = until(lambda: (found := slurm.job(number))["JobState"] in ENDED and found, "it has not ended")
    told = (tmp_path / "out").read_text()
    assert job["ExitCode"] == "64:0" and "submit from its root, or set MEGARL_ROOT" in told and told.count("\n") == 1


def shims(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which these programs are bash scripts."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}


AWAY = 'echo x >>{0}; [ "$(wc -l <{0})" -gt 1 ] || exit 1'  # fails the first time


def test_slurms_controller_is_away_for_a_while(tmp_path: Path) -> None:
    """The nodes are asked for again, so is the requeue; ending a step does not end the script."""
    environ = shims(tmp_path / "bin", squeue=f"{AWAY.format(tmp_path / 'asked')}; echo a,b",
                    scontrol='[ "$1" = show ] && tr , "\\n" <<<"$3"')
    body = f"""nap() {{ sleep 0.1; }}
        begin
        allocated | xargs
        rm {tmp_path}/asked
        sleep 20 & step_pid[x]=$!
        signal_step x TERM
        echo goes on
        kill %1"""
    done = subprocess.run(["bash", "-c", SOURCED + body], env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout.split("\n")[:2] == ["a b", "goes on"], done
    assert "Slurm does not tell the nodes of job 7" in done.stderr


def test_the_guard_asks_again(tmp_path: Path) -> None:
    """Nobody else would."""
    environ = shims(tmp_path / "bin", scontrol=f"{AWAY.format(tmp_path / 'asked')}; echo $* >{tmp_path}/requeued",
                    sleep="exec /bin/sleep 0.2")
    (tmp_path / "alive").write_text("1\n")
    guard = subprocess.Popen(["bash", str(ROOT / "slurm" / "guard.sh"), str(tmp_path / "alive"), "1", "7_2"],
                             env=environ, stdout=subprocess.DEVNULL)
    try:
        until((tmp_path / "requeued").exists, "it was not requeued")
    finally:
        guard.kill()
        guard.wait()
    assert (tmp_path / "requeued").read_text() == "requeue 7_2\n"


def test_counting_outlasts_a_full_disk(tmp_path: Path) -> None:
    """Else the guard would requeue a job that lives."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "7.0.alive").symlink_to("/dev/full")
    done = subprocess.run(["bash", "-c", f"{SOURCED}begin\nrun_dir={tmp_path}\nstart_counting\nsleep 1\n"
                           "kill -0 $counter && echo counts; kill $counter"],
                          env=shims(tmp_path / "bin") | {"ENVIRONMENT": "BATCH"}, capture_output=True, text=True,
                          timeout=30)
    assert done.stdout == "counts\n", done


def test_a_clock_that_is_set_stops_nobody(tmp_path: Path) -> None:
    """bash counts SECONDS by the wall clock; a node whose sign of life is new has not been silent for an hour."""
    (tmp_path / "trainers0").mkdir()
    (tmp_path / "trainers0" / "alive").write_text("1\n")
    body = f"""begin
        run_dir={tmp_path} life_dir={tmp_path} dead_s=60
        step_nodes[trainers]=n1
        if lost_a_node trainers trainers 0; then echo lost at first; fi
        SECONDS=$((SECONDS + 3600)) # what a clock that is set to an hour later makes of them
        nap 0.1
        lost_a_node trainers trainers 0 || echo "is there after $quiet_s s" """
    done = subprocess.run(["bash", "-c", SOURCED + body], env=shims(tmp_path / "bin"), capture_output=True, text=True,
                          timeout=30)
    assert re.fullmatch(r"is there after [01] s\n", done.stdout), done
