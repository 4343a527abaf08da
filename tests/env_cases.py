"""Environments that behave and misbehave, for tests: named in configs as `env_cases:NAME`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from chat_templates import TOOLS

from megarl.rollout.environments.protocol import Action, Step, Task

EVENTS: list[str] = []  # what happened, in order


class Count:
    """Rewards 1, 2, 3 ... for the turns; ends after `turns`. `fault` says what goes wrong, in step 1 unless it says."""

    tools = TOOLS

    def __init__(self, turns: int = 3, fault: str = "", times: int = 10**6, finish: float | None = None) -> None:
        self._turns, self._fault, self._times, self._done = turns, fault, times, 0
        if finish is not None:
            self.finish = self._finish
            self._last = finish
        EVENTS.append("made")
        if fault == "made":
            raise ValueError("no such option")
        self._number = EVENTS.count("made")

    async def reset(self, task: Task) -> str | None:
        if self._fault == "reset" and self._number <= self._times:
            raise ValueError("no such world")
        return None

    async def step(self, action: Action) -> Any:
        self._done += 1
        faulty = self._done == 1 and self._number <= self._times
        if faulty and self._fault == "raise":
            raise KeyError("the tool broke")
        if faulty and self._fault == "exit":
            sys.exit("out of luck")
        if faulty and self._fault == "cancel":
            raise asyncio.CancelledError
        if faulty and self._fault == "cancel_self":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        if faulty and self._fault == "hang":
            await asyncio.sleep(3600)
        if faulty and self._fault == "stubborn":
            while "free" not in EVENTS:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    EVENTS.append("ignored")
        if faulty and self._fault == "nan":
            return "x", float("nan"), False
        if faulty and self._fault == "shape":
            return "x"
        if faulty and self._fault == "message":
            return [{"content": "who says it?"}], 0.0, False
        return Step("go on", float(self._done), self._done == self._turns)

    async def _finish(self) -> float:
        return self._last

    async def close(self) -> None:
        EVENTS.append("closed")


class _Odd:
    """Says what no chat template takes, or is no environment at all."""

    def __init__(self, what: str) -> None:
        self._what = what
        if what == "tools":
            self.tools = ["add"]
        if what == "finish":
            self.finish = self._finish

    async def reset(self, task: Task) -> Any:
        unnamed = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
        return [unnamed, *task.messages] if self._what == "call" else None

    def step(self, action: Action) -> Any:
        if self._what == "sync":
            raise ValueError("it is not awaited")
        return self._step()

    async def _step(self) -> Any:
        said = {"parts": {"role": "user", "content": ["x"]}, "bytes": {"role": "user", "content": b"x"},
                "json": {"role": "assistant", "content": "", "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": "{"}}]},
                "half": "half of a character: \ud83d"}
        return Step(said.get(self._what, "go on"), 1.0)

    def _finish(self) -> float:
        raise ValueError("no end")


def odd(what: str) -> _Odd:
    """A factory: what it makes is not looked at before the run."""
    return _Odd(what)


async def chatty(client: Any, task: Task, *, turns: int = 2, reward: float | None = 0.5, text: str = "",
                 stop: Any = (), limit: Any = None) -> Any:
    """A plain function that talks in process."""
    messages = list(task.messages)
    for number in range(turns):
        reply = await client.chat(messages, stop=stop, max_tokens=limit)
        reply.turn.reward = float(number)
        messages += [reply.message, {"role": "user", "content": "and?"}]
    return text if reward is None and text else reward


async def swallows(client: Any, task: Task) -> float:
    """A function that takes every error for an answer."""
    try:
        await client.chat(task.messages)
    except Exception:
        pass
    return 1.0


async def endless(client: Any, task: Task) -> float:
    """Never has enough."""
    messages = list(task.messages)
    while True:
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": "more"}]


async def silent(client: Any, task: Task) -> float:
    """Never asks the model."""
    return 1.0


async def agent(client: Any, task: Task) -> float:
    """An agent that knows the OpenAI protocol alone."""
    import aiohttp

    messages = list(task.messages)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(3):
            body = {"model": client.model, "messages": messages, "tools": TOOLS, "temperature": 0.3,
                    "stream": number == 1}
            async with session.post(f"{client.base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                message = await _message(response, number == 1)
            messages.append(message)
            calls = message.get("tool_calls") or []
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls] or [
                {"role": "user", "content": "go on"}]
    return float(len([one for one in messages if one["role"] == "tool"]))


async def _message(response: Any, streamed: bool) -> dict[str, Any]:
    import json

    if not streamed:
        return (await response.json())["choices"][0]["message"]
    lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    delta = chunks[0]["choices"][0]["delta"]
    assert chunks[1]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    for call in delta.get("tool_calls") or []:
        call.pop("index")
    return delta
