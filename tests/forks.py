"""Test processes forked from one server that has imported the heavy packages: a moment each instead of seconds."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = "forks_preload"


def context() -> ForkServerContext:
    """The multiprocessing context to start processes from; its server runs, and ends with this process."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([PRELOAD])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    paths = [str(ROOT), str(ROOT / "tests"), before["PYTHONPATH"]]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return found
