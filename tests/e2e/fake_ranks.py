"""Ranks that end in the way that FAKE_END says, in place of megarl.train; without torch they start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.errors import UserMistake, run_main


def main(argv: list[str]) -> None:
    """Rank 0 prints a line, starts a child in a session of its own and waits; rank 1 ends as told."""
    if os.environ["RANK"] == "0":
        print("rank 0 is here", *argv, flush=True)
        print("for the log of rank 0", file=sys.stderr)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        (Path(os.environ["MEGARL_RUN_DIR"]) / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    print("rank 1 is not to be seen", flush=True)
    while not (Path(os.environ["MEGARL_RUN_DIR"]) / "pids").exists():
        time.sleep(0.05)
    match os.environ["FAKE_END"]:
        case "mistake":
            raise UserMistake("7 is too much", "some.key", "use 6")
        case "bug":
            raise ValueError("this should not happen\nsecond line")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
