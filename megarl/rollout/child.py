"""Becomes another program that the kernel kills when its parent dies. A script: `child.py PARENT_PID PROGRAM ARGS...`.

A process of its own instead of code between fork and exec, which is unsafe in a parent with threads. The kernel's
promise is kept over exec; it covers the program itself, not the program's own children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Ask for SIGKILL at the parent's death, make sure it has not died before, and become the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the parent died before its child began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
