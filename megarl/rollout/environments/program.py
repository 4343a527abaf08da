"""The environment `program`: any program that talks to an OpenAI-compatible API is an episode, unchanged.

The program gets OPENAI_BASE_URL and OPENAI_API_KEY, and the prompt on its standard input. What it prints is its answer,
for reward terms to score; if the last line is a JSON object with a number `reward`, that is the reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from typing import IO, TYPE_CHECKING

from megarl.rollout.environments.endpoint import MODEL

if TYPE_CHECKING:
    from megarl.rollout.environments.play import Client
    from megarl.rollout.environments.protocol import Task

TAIL = 500  # characters of stderr that a failure tells


async def run(client: Client, task: Task, *, command: list[str], give_label: bool = False
              ) -> tuple[float | None, str]:
    """Run the program to its end.

    Args:
        command: its words.
        give_label: also tell it the reference answer, for one that scores itself. Its input then, as in the other
            case, is one JSON object: prompt, extra, and label.
    Raises:
        RuntimeError: it ended with another status than 0.
    """
    told = {"prompt": task.text, "extra": task.extra} | ({"label": task.label} if give_label else {})
    environment = {**os.environ, "OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key,
                   "OPENAI_MODEL": MODEL}
    # files: what the program has started and left behind would hold pipes open, and the end of them is waited for
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=output,
                                                       stderr=errors, env=environment, start_new_session=True)
        try:
            await process.communicate(json.dumps(told, default=str).encode())
        finally:
            _end(process)
            await process.wait()
        if process.returncode:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {_text(errors)[-TAIL:]}")
        return _read(_text(output))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _read(output: str) -> tuple[float | None, str]:
    """(reward or None, answer)."""
    before, _, last = output.rpartition("\n")
    try:
        value = json.loads(last)
    except ValueError:
        return None, output
    if isinstance(value, dict) and "reward" in value:
        return value["reward"], before.strip()
    return None, output


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
