"""Start this node's ranks with torchrun, and turn the way they end into one error and one exit status.

`python -m megarl.launch [--check] CONFIG [key.path=value ...]`. Config and packages are checked before any process
starts; with --check that is all. One node: the number of ranks follows from the config. Several: run this on each node
with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, and NPROC_PER_NODE where the nodes differ: node 0 takes the
first ranks, which are trainers, and no node may get more trainers than it has GPUs. torchrun's own output and each
rank's go to files below `run.dir`/logs; only rank 0's stdout is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from megarl import versions
from megarl.config.check import load_checked
from megarl.config.schema import ClusterConfig
from megarl.errors import EXIT_FAULT, EXIT_MISTAKE, MegarlError, UserMistake, run_main

GRACE_S = 10  # between SIGTERM and SIGKILL of the ranks
_MODULE = "megarl.train"


@dataclass(frozen=True)
class Node:
    """This node's part of the world.

    Attributes:
        count, rank: number of nodes, and of this one among them.
        processes: ranks started here.
        address, port: where node 0's rendezvous listens.
    """

    count: int
    rank: int
    processes: int
    address: str
    port: int

    @classmethod
    def from_env(cls, cluster: ClusterConfig) -> Node:
        """Read NNODES, NODE_RANK, NPROC_PER_NODE (a number, or one for each node: 8,8,4), MASTER_ADDR, MASTER_PORT.

        Raises:
            UserMistake: a value is missing, no number, or does not fit the config; or the port is in use.
        """
        count, rank = _number("NNODES", 1, low=1), _number("NODE_RANK", 0)
        total = cluster.trainers + cluster.rollouts
        if rank >= count:
            raise UserMistake(f"{rank} is not below NNODES ({count})", "NODE_RANK", "number the nodes from 0")
        if count > 1 and "MASTER_ADDR" not in os.environ:
            raise UserMistake(f"must be set for {count} nodes", "MASTER_ADDR", "give node 0's address")
        shares = os.environ.get("NPROC_PER_NODE", "").split(",")
        if shares == [""] and total % count:
            raise UserMistake(f"{count} nodes do not divide the {total} ranks (cluster.trainers + cluster.rollouts)",
                              "NNODES", "change one of them, or set NPROC_PER_NODE to a number for each node: 8,8,4")
        processes = total // count
        if shares != [""]:
            numbers = [_whole("NPROC_PER_NODE", share, low=1) for share in shares]
            if len(numbers) > 1 and (len(numbers), sum(numbers)) != (count, total):
                raise UserMistake(f"{','.join(shares)} is not {total} ranks (cluster.trainers + cluster.rollouts) on "
                                  f"{count} nodes", "NPROC_PER_NODE", "give one number for each node")
            processes = numbers[rank if len(numbers) > 1 else 0]
        if count == 1 and processes != total:
            raise UserMistake(f"{processes} is not cluster.trainers + cluster.rollouts = {total}", "NPROC_PER_NODE",
                              "leave it unset on one node")
        port = _number("MASTER_PORT", 29500 if count > 1 else _free_port(), low=1)
        if rank == 0 and not _is_free(port):
            raise UserMistake(f"port {port} is in use on this node", "MASTER_PORT",
                              "end the process that listens there, or set another port on every node")
        return cls(count, rank, processes, os.environ.get("MASTER_ADDR", "127.0.0.1"), port)

    def command(self, logs: Path, arguments: list[str]) -> list[str]:
        """The torchrun command line. Restarts are left to whoever started this launcher."""
        redirects = "3"  # stdout and stderr of every rank to files
        if self.rank == 0 and self.processes <= 10:  # torchrun takes one digit a rank here
            redirects = ",".join(f"{rank}:{3 if rank else 2}" for rank in range(self.processes))
        elif self.rank == 0:
            redirects = "2"
        return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}",
                f"--nproc-per-node={self.processes}", f"--node-rank={self.rank}", f"--master-addr={self.address}",
                f"--master-port={self.port}", "--max-restarts=0",
                f"--log-dir={logs}", f"--redirects={redirects}", "-m", _MODULE, *arguments]


def _number(name: str, default: int, low: int = 0) -> int:
    return _whole(name, os.environ.get(name, str(default)), low)


def _whole(name: str, text: str, low: int) -> int:
    if not text.isdigit() or int(text) < low:
        raise UserMistake(f"{text!r} is not a whole number of at least {low}", name)
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is not in the way
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


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
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_args(argv)
    config, report = load_checked(arguments.config, arguments.overrides)
    versions.check(config.run.require_apex)
    run_dir = Path(config.run.dir).absolute()
    told = "\n".join([*(f"note: {note}" for note in report.notes), f"run directory: {run_dir}"])
    if arguments.check:
        print(report.summary, told, sep="\n")
        return
    node = Node.from_env(config.cluster)
    logs = run_dir / "logs" / f"node{node.rank}"
    logs.mkdir(parents=True, exist_ok=True)
    lock = _lock(run_dir) if node.rank == 0 else None
    if node.rank == 0:
        (run_dir / "exit.json").unlink(missing_ok=True)  # of an earlier life
        print(told, flush=True)
    environment = {**os.environ, "MEGARL_RUN_DIR": str(run_dir), "PYTHONUNBUFFERED": "1",
                   "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S)}  # torch before 2.12 does not know it and waits 30 s
    try:
        status = _run(node.command(logs, [arguments.config, *arguments.overrides]), environment, logs / "torchrun.log",
                      lock)
    except KeyboardInterrupt:
        (run_dir / "exit.json").unlink(missing_ok=True)  # what the ranks made of being ended is no fault
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
        raise
    if status:
        raise _failure(run_dir, logs, node)


def _failure(run_dir: Path, logs: Path, node: Node) -> RanksFailed:
    """What to tell: the cause left by the first rank that failed, else torchrun's last words."""
    told = run_dir / "exit.json"
    if told.exists():
        cause = json.loads(told.read_text())
        message, status = f"rank {cause['rank']}: {cause['message']}", cause["status"]
    else:
        text = (logs / "torchrun.log").read_text(errors="replace")
        first = re.search(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", text, re.DOTALL)
        what = f"rank {first[1]} ended with exit code {first[2]}" if first else "torchrun ended"
        killed = " (killed, perhaps for want of memory)" if first and first[2] == "-9" else ""
        message, status = f"{what}{killed} without telling why", EXIT_FAULT
    if node.rank:
        message = "see node 0's output"
    return RanksFailed(message if status == EXIT_MISTAKE else f"{message}\n  logs: {logs}", status)


def _lock(run_dir: Path) -> IO[str]:
    """Have the run directory for this run alone, as long as the file is open here or in a child that inherits it.

    Raises:
        UserMistake: another run is using it, or what is left of one whose launcher was killed.
    """
    file = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserMistake(f"another run is using {run_dir}", "run.dir",
                          "wait for it, end its torchrun, or use another directory") from None
    return file


def _run(command: list[str], environment: dict[str, str], log: Path, lock: IO[str] | None) -> int:
    """Run torchrun until it ends; leaves no process behind, also when a signal ends it.

    torchrun inherits the lock on the run directory: if this process is killed, what it leaves running keeps it.

    torchrun gets a session of its own: a terminal's Ctrl-C reaches only this process, which then ends it by SIGTERM.
    """
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    mark = f"MEGARL_LAUNCH={uuid.uuid4()}"
    try:
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment | dict([mark.split("=")]), stdin=subprocess.DEVNULL,
                                       stderr=file, start_new_session=True,
                                       pass_fds=[lock.fileno()] if lock else [])
        deadline = math.inf
        while process.poll() is None:
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
        raise KeyboardInterrupt
    return process.returncode


def _kill_marked(mark: bytes) -> None:
    """Kill every process that inherited this entry of the environment, whoever its parent is by now."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_main(launch, sys.argv[1:]))
