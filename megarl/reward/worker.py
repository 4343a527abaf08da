"""A reward worker: a process that scores one sample after the other. Started by `process.Worker`, never by hand.

It imports the registry and the functions of its terms, nothing of torch or megatron. Messages are pickles over one
pipe. In: the terms, once; then jobs `(numbers of the terms to run, response, label, PromptView)`. Out: `("ready",)` or
`("mistake", what, where, remedy)`; then for each term of a job, in order, `("value", float)` or
`("error", kind, text)`. One answer per term tells the parent which term hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megarl.errors import UserMistake
from megarl.reward import registry


def evaluate(function: Callable[..., Any], response: str, label: Any, prompt: registry.PromptView) -> tuple:
    """Run one reward function; an exception or a result that is no finite number becomes an error."""
    try:
        value = function(response, label, prompt)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except (Exception, SystemExit) as error:
        return ("error", "raised", f"{type(error).__name__}: {error}")
    if not isinstance(value, numbers.Real):
        return ("error", "not a number", f"returned {value!r:.200}")
    if not math.isfinite(value):
        return ("error", "not finite", f"returned {value!r}")
    return ("value", float(value))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends, even if Python hangs."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def main(handle: int, parent: int) -> None:
    """Serve jobs until the parent closes the pipe."""
    die_with(parent)
    connection = Connection(handle)
    try:
        functions = [registry.bind(term, f"reward.terms.{number}") for number, term in enumerate(connection.recv())]
    except UserMistake as mistake:
        connection.send(("mistake", mistake.what, mistake.where, mistake.remedy))
        return
    connection.send(("ready",))
    while True:
        try:
            terms, response, label, prompt = connection.recv()
        except EOFError:
            return
        for term in terms:
            connection.send(evaluate(functions[term], response, label, prompt))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
