"""What faults cost a job on a real Slurm: the tiny MoE config, two trainer nodes, one of rollout ranks, one spare.

    python tests/bench/slurm.py [--dead-s 12]

Needs root, slurm-wlm and munge (tests/slurm/cluster.py). Each case is a job of its own; a node loses its power by
losing every process and its link at once. Slurm itself notices that after 20 to 30 s here, and after 300 s with its
defaults; the job script does after DEAD_S. The times include loading Python and torch in each process, on however few
cores there are.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "slurm")]

from cluster import Cluster, cluster, why_not  # noqa: E402
from good_config import write_files  # noqa: E402
from jobs import Job  # noqa: E402

FOREVER = 100_000


def trains(slurm: Cluster, job: Callable[..., Job]) -> str:
    """From sbatch to the export, with a full preflight of four nodes."""
    one, begun = job(10, PREFLIGHT="full", PREFLIGHT_ARGS="--gemm-ratio 0.05 --pair-ratio 0.05"), time.monotonic()
    assert one.wait(300.0) == ("COMPLETED", "0:0", "0"), one.told()
    assert (one.run / "export" / "config.json").exists() and "n4    1" in one.told()
    return f"10 steps, exported after {time.monotonic() - begun:.0f} s"


def stops(slurm: Cluster, job: Callable[..., Job]) -> str:
    """USR1; the second life ends the run."""
    one = job(40)
    one.reach(3)
    begun = time.monotonic()
    slurm.call("scancel", "--batch", "--signal=USR1", one.number)
    one.requeued(1)
    stopped_s, saved = time.monotonic() - begun, one.step()
    assert one.wait(180.0) == ("COMPLETED", "0:0", "1"), one.told()
    assert [line["step"] for line in one.metrics()] == list(range(1, 41)), "a gap, or a step twice"
    assert f"step_{saved:08d}" in re.findall(r"resumed +(/.*)", one.told())[-1]
    return f"saved step {saved} and in the queue after {stopped_s:.0f} s; the second life began with step {saved + 1}"


def rollout_processes(slurm: Cluster, job: Callable[..., Job]) -> str:
    """kill -9 of everything on the rollout node."""
    return _rollouts(job(FOREVER), lambda one: one.kill("n3"), "rollout node 0 starts again on n3")


def rollout_node(slurm: Cluster, job: Callable[..., Job]) -> str:
    """Power cut of the rollout node."""
    return _rollouts(job(FOREVER), lambda _: slurm.cut_power("n3"), "rollout node 0 starts again on n4")


def _rollouts(one: Job, fault: Callable[[Job], None], told: str) -> str:
    one.reach(3)
    fault(one)
    begun = time.monotonic()
    one.until(lambda: told in one.told(), "no new start", 120.0)
    found_s, at = time.monotonic() - begun, one.step()
    one.reach(at + 3)
    assert one.told().count("resumed ") == 1, "the trainers were started again"
    steps = [line["step"] for line in one.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    return f"new start after {found_s:.0f} s, three more steps after {time.monotonic() - begun:.0f} s; trainers went on"


def trainer_node(slurm: Cluster, job: Callable[..., Job]) -> str:
    """Power cut of the second trainer node."""
    one = job(FOREVER)
    one.reach(3)
    slurm.cut_power("n2")
    begun = time.monotonic()
    one.until(lambda: f"life {one.number}.0.2" in one.told(), "no second life", 120.0)
    launched_s = time.monotonic() - begun
    one.until(lambda: "step " in one.told().partition(f"life {one.number}.0.2")[2].partition("resumed ")[2], "no step",
              120.0)
    assert "trainers on n1 n3; rollout ranks on n4" in one.told()
    steps = [line["step"] for line in one.metrics()]
    assert steps == list(range(1, len(steps) + 1)), "a gap, or a step twice"
    return f"next life after {launched_s:.0f} s, its first step after {time.monotonic() - begun:.0f} s"


def batch_node(slurm: Cluster, job: Callable[..., Job]) -> str:
    """Power cut of the node of the batch script."""
    one = job(FOREVER)
    one.reach(3)
    slurm.cut_power("n1")
    begun = time.monotonic()
    one.until(lambda: slurm.job(one.number)["Restarts"] == "1", "not requeued", 120.0)
    return f"requeued after {time.monotonic() - begun:.0f} s"


def hang(slurm: Cluster, job: Callable[..., Job]) -> str:
    """A rank that sleeps in its first life (ranks that count instead of training)."""
    one, begun = job(20, fake=True, FAKE="hang", HANG_S="30"), time.monotonic()
    assert one.wait(180.0) == ("COMPLETED", "0:0", "0"), one.told()
    assert "no sign of progress for 30 s" in one.told() and "starts after step 5" in one.told()
    return f"HANG_S=30: ended and started again, complete after {time.monotonic() - begun:.0f} s"


def mistake(slurm: Cluster, job: Callable[..., Job]) -> str:
    """A key that there is not."""
    one, begun = job(10, "optim.rate=1"), time.monotonic()
    assert one.wait(60.0) == ("FAILED", "64:0", "0"), one.told()
    return f"ended with status 64 after {time.monotonic() - begun:.0f} s, not requeued"


CASES = (mistake, hang, trains, stops, rollout_processes, rollout_node, trainer_node, batch_node)


def run(case: Callable[[Cluster, Callable[..., Job]], str], slurm: Cluster, files: Path, dead_s: str) -> str:
    """One case, on a cluster that is whole again afterwards."""
    jobs, folder = [], files / case.__name__
    folder.mkdir()

    def submit(steps: int, *overrides: str, fake: bool = False, **environ: str) -> Job:
        jobs.append(Job(slurm, files, folder, steps, *overrides, fake=fake, **{"DEAD_S": dead_s, **environ}))
        return jobs[-1]

    found = case(slurm, submit)
    for one in jobs:
        one.cancel()
    for node in slurm.nodes:
        if slurm.is_off(node):
            slurm.boot(node)
    slurm.wait_idle()
    return f"{case.__name__:20s}{found}"


def main() -> None:
    """Every case, and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dead-s", default="12", help="DEAD_S of the job script (%(default)s)")
    parser.add_argument("--only", nargs="*", help="names of cases")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    lines = []
    with tempfile.TemporaryDirectory(prefix="megarl-slurm-") as name:
        files = Path(name)
        (files / "cluster").mkdir()
        write_files(files)
        with cluster(files / "cluster", nodes=4) as slurm:
            for case in CASES:
                if not arguments.only or case.__name__ in arguments.only:
                    lines.append(run(case, slurm, files, arguments.dead_s))
                    print(lines[-1], flush=True)
    print(f"\nfour nodes on this machine, DEAD_S={arguments.dead_s}, SlurmdTimeout=10", *lines, sep="\n")


if __name__ == "__main__":
    main()
