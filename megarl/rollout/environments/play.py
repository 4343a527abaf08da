"""Letting a user's environment run: one attempt at an episode, under a time limit, with nothing swallowed."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.config.rollout import CLOSE_S
from megarl.errors import MegarlError
from megarl.rollout.environments.chat import Refused
from megarl.rollout.environments.episode import EnginesFailed, Episode, Reply
from megarl.rollout.environments.load import Bound
from megarl.rollout.environments.protocol import Message, NoRoom, Step, Task, as_messages

log = logging.getLogger(__name__)
T = TypeVar("T")

LINES = 3  # of a traceback that a report tells


class Failed(Exception):
    """An attempt gave no reward. `kind`: error (its code raised), timeout, engines, no_room."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Client:
    """What a plain function talks to the model with.

    Attributes:
        base_url, api_key: of an OpenAI-compatible endpoint; the key names the episode.
        model: a name for the `model` field of requests.
    """

    base_url: str
    api_key: str
    model: str
    _episode: Episode

    async def chat(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, max_tokens: int | None = None,
                   stop: str | Sequence[str] = ()) -> Reply:
        """The model's reply to a conversation, without HTTP; see `Episode.ask`.

        A reward for the turn may be set: `reply.turn.reward = 0.5`.
        """
        return await self._episode.ask(messages, tools, max_tokens=max_tokens, stop=stop)


async def play(bound: Bound, episode: Episode, task: Task, client: Client) -> str:
    """One attempt at an episode; its rewards are in `episode.turns`, the terminal one with the last turn.

    Returns:
        The text for reward terms: what the model said last, if the environment gave none.
    Raises:
        Failed: it gave no reward.
        UserMistake, MachineFault: the engines are at fault, or refuse a request; also if the user's code caught it.
    """
    run = _function(bound, episode, task, client) if bound.plain else _object(bound, episode, task)
    work = asyncio.ensure_future(_user(run))  # whatever is odd in what the environment gives is its episode's affair
    try:
        await _until(work, episode, bound.config.timeout_s)
        late = not work.done()
    finally:
        episode.ended = True
        await _end(work, bound.config.name)
    if episode.fault is not None:
        raise episode.fault
    if late:
        raise Failed("timeout", f"no end within {bound.config.timeout_s:g} s, after {len(episode.turns)} turns")
    if work.cancelled():  # and not from here: whoever cancels the run cancels the wait above too
        raise Failed("error", "its code was cancelled")
    return work.result()


async def _end(work: asyncio.Future[str], name: str) -> None:
    """Have the work ended; code that takes no notice is left alone."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=CLOSE_S)
        if not work.done():
            log.warning("environment %s goes on although it was cancelled", name)
    if work.done() and not work.cancelled():
        work.exception()  # else asyncio would complain that nobody looked at it


async def _until(work: asyncio.Future[str], episode: Episode, timeout_s: float) -> None:
    """Wait for the work, not longer than allowed, and not when the engines are at fault."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not work.done() and episode.fault is None and loop.time() < deadline:
        await asyncio.wait({work, episode.faulted}, timeout=deadline - loop.time(),
                           return_when=asyncio.FIRST_COMPLETED)


async def _object(bound: Bound, episode: Episode, task: Task) -> str:
    """An object with reset and step."""
    environment = await _user(_made(bound))
    try:
        first = await _user(environment.reset(task))
        messages = task.messages if first is None else _messages(first, "user", ())
        tools = list(getattr(environment, "tools", None) or ())
        while True:
            try:
                reply = await episode.ask(messages, tools)
            except NoRoom:
                break
            step = _step(await _user(environment.step(reply.action)))
            reply.turn.reward += number(step.reward)
            if step.done:
                break
            messages = [*messages, reply.message, *_messages(step.observation, "", reply.action.calls)]
        finish = getattr(environment, "finish", None)
        return _ended(episode, await _user(finish()) if finish is not None else None)
    except Refused as refused:
        raise Failed("error", str(refused)) from refused
    except EnginesFailed as failed:
        raise Failed("engines", str(failed)) from failed
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            await _user(close())


async def _function(bound: Bound, episode: Episode, task: Task, client: Client) -> str:
    """A plain async function. What it gives back: a reward, or text for reward terms to score, or both."""
    try:
        result = await _user(bound.code(client, task, **bound.options), told=(NoRoom, EnginesFailed))
    except EnginesFailed as failed:
        raise Failed("engines", str(failed)) from failed
    except NoRoom as full:
        raise Failed("no_room", str(full)) from full
    answer = None
    if isinstance(result, tuple) and len(result) == 2:
        result, answer = result
    elif isinstance(result, str):
        result, answer = None, result
    if result is None and not bound.config.reward_terms:
        raise Failed("error", "it gave back no reward, and its reward_terms is false")
    return _ended(episode, result, answer)


def _ended(episode: Episode, terminal: Any, answer: str | None = None) -> str:
    if not episode.turns:
        raise Failed(*("no_room", "the first prompt leaves no room for a reply") if episode.cut else
                     ("error", "the model was never asked"))
    if terminal is not None:
        episode.turns[-1].reward += number(terminal)
    return episode.last_content if answer is None else answer


async def _made(bound: Bound) -> Any:
    """A factory may be asynchronous."""
    environment = bound.code(**bound.options)
    return await environment if inspect.isawaitable(environment) else environment


async def _user(call: Awaitable[T], told: tuple[type[Exception], ...] = ()) -> T:
    """Await the user's code; what it raises becomes Failed, but for the kinds `told` and megarl's own.

    Also SystemExit: asyncio would end the event loop with it, and everybody else's episodes.
    """
    try:
        return await call
    except (Failed, MegarlError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, *told):
        raise
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)).strip().splitlines()
        raise Failed("error", " | ".join(line.strip() for line in lines[-LINES:])) from error


def number(value: Any) -> float:
    """A reward as a finite float.

    Raises:
        Failed: it is none.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise Failed("error", f"{value!r:.80} is no reward") from error
    if not math.isfinite(reward):
        raise Failed("error", f"a reward is {reward}")
    return reward


def _step(result: Any) -> Step:
    if not isinstance(result, tuple) or len(result) != len(Step._fields):
        raise Failed("error", f"step gave {result!r:.80}, not (observation, reward, done)")
    return Step(*result)


def _messages(observation: Any, role: str, calls: Sequence[Any]) -> list[Message]:
    """An observation as messages. Text answers the first call, or is said by the user; messages of role tool that name
    no call answer the calls in order."""
    try:
        messages = as_messages(observation, role or ("tool" if calls else "user"))
    except TypeError as error:
        raise Failed("error", f"observation: {error}") from error
    open_calls, found = iter(calls), []
    for message in messages:
        if message["role"] == "tool" and "tool_call_id" not in message:
            call = next(open_calls, None)
            message = message if call is None else {**message, "tool_call_id": call.id, "name": call.name}
        found.append(message)
    return found

