"""Reward functions that go wrong, for the tests of the pool: they run in its workers."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path


def behave(response, label, prompt, *, factor: float = 1.0):
    """Do what the response says."""
    if response == "raise":
        raise KeyError("no such answer")
    if response == "exit":
        sys.exit(3)
    if response == "hang":
        time.sleep(1000)
    if response == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter for longer than anybody waits
    if response == "hang with child":
        child = subprocess.Popen(["sleep", "1000"])
        Path(label).write_text(str(child.pid))
        child.wait()
    if response == "die":
        os._exit(7)
    if response in ("nan", "inf"):
        return float(response)
    if response == "none":
        return None
    if response == "text":
        return "1.0"
    return factor * len(response)


async def later(response, label, prompt):
    return 0.5


def loaded(response, label, prompt):
    """1.0 if this process has imported torch or megatron."""
    return float(any(name in sys.modules for name in ("torch", "megatron", "megatron.core")))


def process(response, label, prompt):
    return os.getpid()


def view(response, label, prompt):
    return float((prompt.text, prompt.source, prompt.extra, prompt.response_tokens, prompt.finish, label)
                 == ("sort", "digits", {"k": [1]}, 3, "length", {"a": 1}))


def environment(response, label, prompt):
    return float("RANK" in os.environ or "MASTER_PORT" in os.environ)


def too_few(response, label):
    return 1.0
