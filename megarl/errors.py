"""The two kinds of failure a run can end with, and the exit status of each.

A *mistake* (config, data, checkpoint, layout, missing package) is the user's to correct; nobody should retry it.
A *fault* (lost peer, timeout, dead engine) is the machine's; launch scripts may retry it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

EXIT_MISTAKE = 64  # EX_USAGE: do not retry
EXIT_FAULT = 75  # EX_TEMPFAIL: may be retried


class MegarlError(Exception):
    """An error that megarl explains itself; `status` is the exit status of the process that ends with it."""

    status = EXIT_FAULT


class UserMistake(MegarlError):
    """Something the user can correct, told in one or two lines.

    Args:
        what: what is wrong, with the offending value.
        where: file, key or line ("config.yaml: parallel.tensor", "train.jsonl line 12"); "" when `what` says it.
        remedy: what would be right.
    """

    status = EXIT_MISTAKE

    def __init__(self, what: str, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}\n  remedy: {remedy}" if remedy else text)


class MachineFault(MegarlError):
    """A lost peer, a timeout, a dead engine: nothing in the user's files explains it."""


def write_exit(run_dir: Path | str, status: int, message: str) -> None:
    """Leave `exit.json` in the run directory, atomically; the first writer wins.

    torchrun turns every worker status into 1, so launch scripts read the true status from this file. The first
    failure is the cause, later ones are usually its consequences: an existing file is kept.
    """
    directory = Path(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=directory, prefix=".exit-")
    with os.fdopen(handle, "w") as file:
        json.dump({"status": status, "message": message, "rank": int(os.environ.get("RANK", 0))}, file)
    try:
        os.link(name, directory / "exit.json")
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
