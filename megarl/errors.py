"""The two kinds of failure a run can end with, and the exit status of each.

A *mistake* (config, data, checkpoint, layout, missing package) is the user's to correct; nobody should retry it.
A *fault* (lost peer, timeout, dead engine) is the machine's; launch scripts may retry it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

EXIT_MISTAKE = 64  # EX_USAGE: do not retry
EXIT_FAULT = 75  # EX_TEMPFAIL: may be retried
EXIT_BUG = 1  # an exception that nobody foresaw: its traceback is in the log
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


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

    def line(self) -> str:
        """The whole mistake on one line."""
        return str(self).replace("\n  remedy: ", "; ")


class UserMistakes(UserMistake):
    """One or several mistakes told together, one line each."""

    def __init__(self, mistakes: Sequence[UserMistake]) -> None:
        lines = [mistake.line() for mistake in mistakes]
        super().__init__("\n  ".join([f"{len(lines)} mistakes:", *lines]) if len(lines) > 1 else lines[0])
        self.mistakes = tuple(mistakes)


class MachineFault(MegarlError):
    """A lost peer, a timeout, a dead engine: nothing in the user's files explains it."""


class Ended(MachineFault):
    """Ended from outside by a signal. The cause lies elsewhere, so this leaves no `exit.json`."""


def run_main(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run a program's `main(argv)` and turn the way it ends into an exit status, told once.

    With MEGARL_RUN_DIR set (the launcher does it) a failure is left there as `exit.json`, and only the process that
    wrote that file, the first to fail, prints it; its consequences on other ranks stay in their logs. An exception
    that megarl did not foresee also prints its traceback to stderr.

    Returns:
        0; 64 for a mistake, also a missing package, a command line that argparse refused, and a model or batch too
        large for the device; 75 for a fault, also a lost peer or a timeout of torch.distributed and an error of the
        device; 130 for Ctrl-C; 1 for anything else, which is a bug.
    """
    try:
        main(argv)
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Ended as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.status
    except SystemExit as end:
        if end.code == 2:  # argparse has told
            return EXIT_MISTAKE
        raise
    except MegarlError as error:
        status, message = error.status, str(error)
    except Exception as error:  # told and turned into a status, as the outermost frame must
        traceback.print_exc()
        status, message = _unforeseen(error)
    run_dir = os.environ.get("MEGARL_RUN_DIR")
    if run_dir is None or write_exit(run_dir, status, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
    return status


def _unforeseen(error: Exception) -> tuple[int, str]:
    """Status and message of an exception that megarl did not raise itself."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "megarl").startswith("megarl"):
        return EXIT_MISTAKE, f"the package {error.name} is not installed\n  remedy: run: bash launch/setup.sh"
    summary = str(error).strip().splitlines()[:1] or [""]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return EXIT_MISTAKE, (f"{summary[0]}\n  remedy: lower batch.max_tokens, set model.recompute: full, or "
                              f"spread the model over more devices (parallel){_log_hint()}")
    return (EXIT_FAULT if _is_fault(error) else EXIT_BUG), f"{type(error).__name__}: {summary[0]}{_log_hint()}"


def _log_hint() -> str:
    """Where torchrun put this rank's stderr, if it did: beside the error file that it names in the environment."""
    log = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent / "stderr.log"
    return f"; traceback in {log}" if log.is_file() else ""


def _is_fault(error: Exception) -> bool:
    """Whether the network or a peer is to blame. If torch was never loaded, it did not raise: no import here."""
    torch = sys.modules.get("torch")
    kinds: tuple[type, ...] = (ConnectionError, TimeoutError)
    if torch is not None:
        kinds += (torch.AcceleratorError,)
    if torch is not None and torch.distributed.is_available():
        kinds += (torch.distributed.DistError,)
    # gloo reports a lost peer or a timeout as a plain RuntimeError that names gloo or one of its source files
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def write_exit(run_dir: Path | str, status: int, message: str) -> bool:
    """Leave `exit.json` in the run directory, atomically; the first writer wins.

    torchrun turns every worker status into 1, so launch scripts read the true status from this file. The first
    failure is the cause, later ones are usually its consequences: an existing file is kept. But a mistake is never the
    consequence of a fault: it replaces the fault of a rank that has missed this one before it could tell.

    Returns:
        Whether this call wrote the file.
    """
    directory = Path(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=directory, prefix=".exit-")
    rank = int(os.environ.get("MEGARL_FIRST_RANK", 0)) + int(os.environ.get("RANK", 0))
    with os.fdopen(handle, "w") as file:
        json.dump({"status": status, "message": message, "rank": rank}, file)
    try:
        os.link(name, directory / "exit.json")
        return True
    except FileExistsError:
        if status != EXIT_MISTAKE or json.loads((directory / "exit.json").read_text())["status"] != EXIT_FAULT:
            return False
        os.link(name, f"{name}.mistake")
        os.replace(f"{name}.mistake", directory / "exit.json")
        return True
    finally:
        os.unlink(name)
