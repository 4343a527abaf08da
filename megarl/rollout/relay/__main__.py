"""`python -m megarl.rollout.relay --model-path M --directory D --host H --port P -- COMMAND ...`: an engine's command
and its relay, as one process for whoever started it: signals go to the engine, and its end is this program's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import uvicorn

from megarl.cluster.keys import Keys
from megarl.rollout.embedded.auth import RequireKeys
from megarl.rollout.relay.files import Copy
from megarl.rollout.relay.server import Relay

_CHILD = Path(__file__).parents[1] / "child.py"


def main(argv: list[str]) -> int:
    """Run both; the engine's status, or its signal."""
    parser = argparse.ArgumentParser(prog="megarl.rollout.relay", description=__doc__)
    for name in ("model-path", "directory", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    engine = subprocess.Popen([sys.executable, str(_CHILD), str(os.getpid()), *given.command])
    signal.signal(signal.SIGTERM, lambda *_: engine.terminate())
    directory = Path(given.directory)
    app = RequireKeys(Relay(Copy(directory, Path(given.model_path))).app(), Keys.from_env(os.environ))
    server = uvicorn.Server(uvicorn.Config(app, host=given.host, port=given.port, log_level="warning",
                                           access_log=False))
    threading.Thread(target=server.run, name="relay", daemon=True).start()
    status = engine.wait()
    shutil.rmtree(directory, ignore_errors=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
