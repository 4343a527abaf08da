"""Supervisors of scripted engines in processes of their own, for tests."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import forks
import torch.distributed as dist
from rollout_parts import make_config, new_store

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.cluster.partition import Partition
from megarl.config.schema import Config
from megarl.rollout.fleet import Fleet, beat_for_trainers, request_stop

SCRIPTED = str(Path(__file__).with_name("scripted_engine.py"))


def _supervise(port: int, config: Config, rank: int, run_dir: str, options: list[str] | None, ports: list[int],
               keys: Keys) -> None:
    """In the child: supervise, with engine_command replaced unless `options` is None; leave the outcome in a file."""
    from megarl.config import sglang
    from megarl.rollout import supervisor

    os.environ.update(RANK=str(rank), WORLD_SIZE="9", MASTER_ADDR="nowhere", MASTER_PORT="1", LOCAL_RANK="0",
                      TORCHELASTIC_USE_AGENT_STORE="True", MEGARL_RUN_DIR=run_dir, MARK_OF_TEST=run_dir)
    if options is not None:
        supervisor.engine_command = lambda config, number, first_gpu, host, port, version, part, keys_file: [
            sys.executable, SCRIPTED, "--host", host, "--port", str(port), "--weight-version", version, *options,
            *([f"--part={part.node}/{part.nodes}@{part.meeting}"] if part else [])]
        sglang.installation = lambda *_: None
    if ports:
        real, supervisor.free_port = supervisor.free_port, lambda host: ports.pop(0) if ports else real(host)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    partition = Partition(rank, config.cluster.trainers + config.cluster.rollouts, 0, config.cluster.trainers,
                          config.cluster.rollouts)
    outcome: dict[str, Any] = {"error": None}
    try:
        supervisor.supervise(config, partition, store, run_dir, keys=keys)
    except (Exception, KeyboardInterrupt) as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    Path(run_dir, f"outcome{rank}.json").write_text(json.dumps(outcome))


class Supervised:
    """Rollout ranks, each a process with `supervise` in it, under a store and a trainer's heartbeat of this process.

    A context manager; at its end everything must be gone, which is checked.

    Args:
        run_dir: for logs and outcomes.
        rollouts, engines: ranks, and engines on each.
        options: of the scripted engines; None: real engines.
        ports: taken by the first starts of engines instead of free ones.
        beat: whether the trainers show signs of life.
        keys: of the engines' servers.
        config: sections over those of `make_config`.
    """

    def __init__(self, run_dir: Path, *, rollouts: int = 1, engines: int = 1, options: list[str] | None = (),
                 ports: list[int] = (), beat: bool = True, model: str = "none", keys: Keys = NO_KEYS,
                 **config: dict[str, Any]) -> None:
        self.config = make_config(model, **{
            **config, "cluster": {"trainers": 1, "rollouts": rollouts, **config.get("cluster", {})},
            "rollout": {"engines_per_rank": engines, "start_attempts": 2, **config.get("rollout", {})}})
        self.run_dir, self.store = run_dir, new_store()
        self.heartbeat = beat_for_trainers(self.store) if beat else None
        self.fleet = Fleet.from_config(self.config, self.store, keys)
        self._arguments = [(self.store.port, self.config, 1 + rank, str(run_dir),
                      None if options is None else list(options), list(ports), keys) for rank in range(rollouts)]
        self.processes: list[Any] = [None] * rollouts
        for rank in range(rollouts):
            self.start_again(rank)

    def start_again(self, rank: int) -> None:
        """Start a rank's process."""
        self.processes[rank] = forks.context().Process(target=_supervise, args=self._arguments[rank])
        self.processes[rank].start()

    def outcome(self, rank: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
        """How the supervisor ended."""
        self.processes[rank].join(timeout_s)
        assert self.processes[rank].exitcode == 0, f"supervisor: exit code {self.processes[rank].exitcode}"
        return json.loads((self.run_dir / f"outcome{1 + rank}.json").read_text())

    def starts(self, engine: str = "0.0") -> int:
        """How often the engine was started, by its log."""
        return self.log(engine).count("--- ")

    def log(self, engine: str = "0.0") -> str:
        """The engine's log."""
        return (self.run_dir / "logs" / f"engine-{engine}.log").read_text()

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        request_stop(self.store, "end of test")
        for process in self.processes:
            process.join(20)
            alive = process.is_alive()
            if alive:
                process.kill()
                process.join()
            assert not alive or kind is not None, "a supervisor did not stop"
        if self.heartbeat is not None:
            self.heartbeat.close()
        if kind is None:
            until(lambda: not processes_with(str(self.run_dir)), "processes were left behind")


def processes_with(text: str) -> list[int]:
    """Ids of processes whose command line or environment at their start contains `text` (engines inherit a mark)."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                content = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile, or is another user's
            if text.encode() in content:
                found.append(int(folder.name))
    return found


def listening(pids: Iterable[int]) -> dict[int, str]:
    """Ports that these processes listen on, with the address: loopback or another one, "0.0.0.0" or "::" for all."""
    found = {}
    for pid in pids:
        own = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                own.add(os.readlink(fd))
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    parts = [bytes.fromhex(address[i:i + 8])[::-1] for i in range(0, len(address), 8)]
                    found[int(port, 16)] = str(ipaddress.ip_address(b"".join(parts)))
    return found


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
    return value
