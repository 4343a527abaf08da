"""Start this node's ranks with torchrun, and turn the way they end into one error and one exit status.

`python -m megarl.launch [--check] CONFIG [key.path=value ...]`. Config and packages are checked before any process
starts; with --check that is all. One node: the number of ranks follows from the config. Several: run this on each node
with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, and NPROC_PER_NODE where the nodes differ: node 0 takes the
first ranks, which are trainers, and no node may get more trainers than it has GPUs. Trainers and rollout ranks can be
started apart, with MEGARL_PARTITION (see `cluster.nodes`). torchrun's own output and each rank's go to files below
`run.dir`/logs; only the stdout of the world's first rank is shown. MEGARL_PROGRAM names a module to run in place of
megarl.train.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from megarl import versions
from megarl.cluster.lock import lock
from megarl.cluster.nodes import Node, divide
from megarl.config.check import load_checked
from megarl.errors import EXIT_FAULT, EXIT_MISTAKE, MachineFault, MegarlError, UserMistake, run_main

GRACE_S = 10  # between SIGTERM and SIGKILL of the ranks
BEAT_S = 5.0  # between this node's signs of life
LOCK_S = 120.0  # a file server may keep the lock of a node that has lost its power for its lease, mostly 90 s
NO_ROOM = 1 << 16  # bytes: less than torchrun and the ranks need to say why they failed


def torchrun_command(node: Node, logs: Path, arguments: list[str]) -> list[str]:
    """The torchrun command line. Restarts are left to whoever started this launcher."""
    redirects = "3"  # stdout and stderr of every rank to files
    if node.rank == 0 and node.processes <= 10:  # torchrun takes one digit a rank here
        redirects = ",".join(f"{rank}:{3 if rank else 2}" for rank in range(node.processes))
    elif node.rank == 0:
        redirects = "2"
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={node.count}",
            f"--nproc-per-node={node.processes}", f"--node-rank={node.rank}", f"--master-addr={node.address}",
            f"--master-port={node.port}", f"--rdzv-id={node.life or 'none'}", "--max-restarts=0", f"--log-dir={logs}",
            f"--redirects={redirects}", "-m", os.environ.get("MEGARL_PROGRAM", "megarl.train"), *arguments]


class RanksFailed(MegarlError):
    """The ranks ended in failure; `status` is theirs."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def launch(argv: list[str]) -> None:
    """Check, start, wait.

    Raises:
        UserMistake: nothing was started.
        RanksFailed: what `exit.json` tells of the first failure.
        KeyboardInterrupt: a signal ended the run; every process is gone.
    """
    parser = argparse.ArgumentParser(prog="launch/torchrun.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="check config and packages, start nothing")
    parser.add_argument("--nodes", type=int, help="with --check: how many there are; tells what each is for")
    parser.add_argument("--gpus", type=int, default=0, help="with --nodes: of each node")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_args(argv)
    config, report = load_checked(arguments.config, arguments.overrides)
    versions.check(config.run.require_apex)
    run_dir = Path(config.run.dir).absolute()
    told = "\n".join([*(f"note: {note}" for note in report.notes), f"run directory: {run_dir}"])
    if arguments.check:
        division = divide(config, arguments.nodes, arguments.gpus).lines() if arguments.nodes else []
        print(report.summary, told, *division, sep="\n")
        return
    node = Node.from_env(config.cluster)
    logs = run_dir / "logs" / node.life / node.name
    logs.mkdir(parents=True, exist_ok=True)
    # a rollout rank's end is no failure of the run: its cause is left with its logs
    told_in = logs if node.partition == "rollouts" else run_dir
    lock = _lock(run_dir, LOCK_S if node.life else 0.0) if node.leads else None
    if node.leads or told_in is logs:
        (told_in / "exit.json").unlink(missing_ok=True)  # of an earlier life
    if node.leads:
        print(told, flush=True)
    environment = {**os.environ, **node.environment(), "MEGARL_RUN_DIR": str(told_in), "PYTHONUNBUFFERED": "1",
                   "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S)}  # torch before 2.12 does not know it and waits 30 s
    try:
        status = _run(torchrun_command(node, logs, [arguments.config, *arguments.overrides]), environment, logs, lock,
                      lambda: (told_in / "exit.json").exists())
    except Interrupted as interrupted:
        if not interrupted.told:
            _forget_consequences(told_in, node)
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
        raise
    if status:
        raise _failure(told_in, logs, node)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; `told` says whether a cause of its end was known before."""

    def __init__(self, told: bool) -> None:
        self.told = told


def _forget_consequences(told_in: Path, node: Node) -> None:
    """What this node's ranks made of being ended by a signal is no fault. Another node's may be why it was sent."""
    told = told_in / "exit.json"
    if told.exists() and json.loads(told.read_text())["rank"] in node.ranks:
        told.unlink(missing_ok=True)


def _failure(told_in: Path, logs: Path, node: Node) -> RanksFailed:
    """What to tell: the cause left by the first rank that failed, else torchrun's last words."""
    told = told_in / "exit.json"
    if told.exists():
        cause = json.loads(told.read_text())
        message, status = f"rank {cause['rank']}: {cause['message']}", cause["status"]
    elif shutil.disk_usage(told_in).free < NO_ROOM:
        message, status = (f"no room is left in {told_in}: what failed could not be written down there\n"
                           "  remedy: make room; the same command goes on from the newest checkpoint"), EXIT_FAULT
    else:
        text = (logs / "torchrun.log").read_text(errors="replace")
        first = re.search(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", text, re.DOTALL)
        message = _unexplained(first[1], int(first[2])) if first else "torchrun ended without telling why"
        status = EXIT_FAULT
    if node.rank:
        message = "see node 0's output"
    return RanksFailed(message if status == EXIT_MISTAKE else f"{message}\n  logs: {logs}", status)


def _unexplained(rank: str, code: int) -> str:
    """What to tell of a rank that left no cause. A negative code is the number of the signal that killed it."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code} without telling why"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    why, more = "", ""
    if name == "SIGKILL":
        why = ", most often by the system for want of memory (dmesg tells)"
        more = "; if memory was short, use less or give more"
    return f"rank {rank} was killed by {name}{why}\n  remedy: the same command goes on from the newest checkpoint{more}"


def _lock(run_dir: Path, patience_s: float) -> IO[str]:
    """Have the run directory for this run alone, as long as the file is open here or in a child that inherits it.

    Raises:
        UserMistake: another run is using it, or what is left of one whose launcher was killed.
        MachineFault: the same, after a batch script's launcher has waited for `patience_s`.
    """
    file, begun = (run_dir / ".lock").open("w"), time.monotonic()
    while True:
        try:
            if not lock(file):
                print(f"note: the file system of {run_dir} has no locks: nothing keeps another run away", flush=True)
            return file
        except BlockingIOError:
            if not patience_s:
                raise UserMistake(f"another run is using {run_dir}", "run.dir",
                                  "wait for it, end its torchrun, or use another directory") from None
            if time.monotonic() - begun > patience_s:
                raise MachineFault(f"another run is using {run_dir} after {patience_s:.0f} s") from None
            time.sleep(1.0)


def _run(command: list[str], environment: dict[str, str], logs: Path, lock: IO[str] | None,
         told: Callable[[], bool]) -> int:
    """Run torchrun until it ends; leaves no process behind, also when a signal ends it (Interrupted).

    `told` says whether a cause of the run's end is known; it is asked when a signal comes.

    torchrun inherits the lock on the run directory: if this process is killed, what it leaves running keeps it.

    torchrun gets a session of its own: a terminal's Ctrl-C reaches only this process, which then ends it by SIGTERM.
    While it runs, `logs`/alive counts up, so that a batch script sees within seconds that a node is gone.
    """
    signals: list[bool] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(told())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    mark = f"MEGARL_LAUNCH={uuid.uuid4()}"
    try:
        with (logs / "torchrun.log").open("w") as file:
            process = subprocess.Popen(command, env=environment | dict([mark.split("=")]), stdin=subprocess.DEVNULL,
                                       stderr=file, start_new_session=True,
                                       pass_fds=[lock.fileno()] if lock else [])
        deadline, begun, beats = math.inf, time.monotonic(), 0
        while process.poll() is None:
            if time.monotonic() - begun >= beats * BEAT_S:
                beats += 1
                with contextlib.suppress(OSError):  # a full disk is the run's to tell
                    (logs / "alive").write_text(f"{beats}\n")
            if signals and deadline == math.inf:
                process.terminate()
                deadline = time.monotonic() + GRACE_S + 5
            if len(signals) > 1 or time.monotonic() > deadline:
                process.kill()
            time.sleep(0.1)
    finally:
        _kill_marked(mark.encode())
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        raise Interrupted(signals[0])
    return process.returncode


def _kill_marked(mark: bytes) -> None:
    """Kill every process that inherited this entry of the environment, whoever its parent is by now."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_main(launch, sys.argv[1:]))
