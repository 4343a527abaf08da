"""One reward worker process, seen from the parent: start, run a job under a time limit, replace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megarl.errors import MachineFault, UserMistake
from megarl.reward.registry import PromptView, Term

# Set by torchrun and Slurm for the trainer; a reward function that uses torch.distributed must not join its world.
_DISTRIBUTED = ("TORCHELASTIC_", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """What one term of one sample came to.

    Attributes:
        value: the reward; None if it failed.
        kind: "" or why it failed: "raised", "not a number", "not finite", "timed out", "died" (its worker ended), or
            "not run" (its worker ended in an earlier term of the sample).
        text: the exception or result.
    """

    value: float | None = None
    kind: str = ""
    text: str = ""


class Worker:
    """A worker process that is replaced when it hangs or dies.

    `start` and `run` belong to one thread that lives as long as the worker: on Linux the process is killed when the
    thread that started it ends.

    Args:
        terms: the reward terms that the process binds.
        start_timeout_s: until it has imported all it needs.
    """

    def __init__(self, terms: Sequence[Term], start_timeout_s: float) -> None:
        self._terms = list(terms)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()  # a process is not reaped while another thread kills it: its id could be reused

    @property
    def running(self) -> bool:
        """Whether there is a process that takes jobs."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """The process's id, None while there is none."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            UserMistake: a function is unknown, lacks a package or does not take its options.
            MachineFault: the process ended or was not ready in time.
        """
        ours, theirs = Pipe()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_DISTRIBUTED)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.reward.worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._connection = ours
        try:
            ours.send(self._terms)
            reply = ours.recv() if ours.poll(self._start_timeout_s) else ("late",)
        except (EOFError, OSError):
            reply = ("ended",)
        if reply[0] == "ready":
            return
        status = self.stop()
        if reply[0] == "mistake":
            raise UserMistake(*reply[1:])
        if reply[0] == "late":
            raise MachineFault(f"a reward worker was not ready within {self._start_timeout_s:g} s")
        raise MachineFault(f"a reward worker ended at its start with status {status}")

    def run(self, terms: Sequence[int], response: str, label: Any, prompt: PromptView, limit_s: float) -> list[Outcome]:
        """Run these terms on one sample; together they have `limit_s` seconds. Returns one outcome per term.

        If the process hangs it is killed, if it dies it is buried; `running` is then False and `start` makes another.
        """
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + limit_s
        try:
            self._connection.send((list(terms), response, label, prompt))
            while len(outcomes) < len(terms):
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    outcomes.append(Outcome(None, "timed out", f"no result in {limit_s:g} s, its worker was killed"))
                    break
                kind, *rest = self._connection.recv()
                outcomes.append(Outcome(*rest) if kind == "value" else Outcome(None, *rest))
        except (EOFError, OSError):
            outcomes.append(Outcome(None, "died", f"its worker ended with status {self.stop()}"))
        return outcomes + [Outcome(None, "not run", "an earlier term ended the worker")] * (len(terms) - len(outcomes))

    def kill(self) -> None:
        """Kill the process and its children, from any thread; the owning thread sees it die."""
        with self._lock:
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Kill the process with its children and reap it. Returns its exit status (negative: a signal)."""
        if self._process is None:
            return None
        self.kill()
        with self._lock:
            status = self._process.wait()
            self._process = None
        self._connection.close()
        return status
