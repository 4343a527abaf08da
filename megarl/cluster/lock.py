"""A file that one process holds, so that two do not write into the same directory."""

from __future__ import annotations

import errno
import fcntl
from typing import IO


def lock(file: IO[str]) -> bool:
    """Have an open file for this process and those that inherit it, until all have closed it. Does not wait.

    Returns:
        False where the file system has no locks (Lustre can be mounted so): then nothing keeps others away.
    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True
