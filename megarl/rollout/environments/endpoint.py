"""An OpenAI-compatible endpoint in front of the fleet: programs that know nothing of training talk to the policy.

`POST /v1/chat/completions` (also streamed) and `GET /v1/models`. The API key names the episode, so that calls of many
episodes at once are told apart; a key is good as long as its episode lasts. Each call is `Episode.ask`: its tokens and
log-probs are recorded and glued to those of the calls before it.

How tokens are sampled is the run's affair, since training must know the distribution: `temperature`, `top_p` and `seed`
of a request have no effect. What would change the answer in a way that cannot be had is refused with status 400.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from megarl.errors import MegarlError
from megarl.rollout.environments.chat import Message, Refused
from megarl.rollout.environments.episode import EnginesFailed, Episode, Reply
from megarl.rollout.environments.protocol import NoRoom

log = logging.getLogger(__name__)

MODEL = "policy"
LARGEST = 64 << 20  # bytes of a request
# fields that would change the answer -> the values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "top_logprobs": (None, 0), "logit_bias": (None, {}),
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "response_format": (None, {"type": "text"}),
    "functions": (None, []), "function_call": (None, "none", "auto"), "tool_choice": (None, "auto", "none"),
    "audio": (None,), "modalities": (None, ["text"]), "prediction": (None,)}
_IGNORED = ("temperature", "top_p", "seed")


class _Wrong(Exception):
    """A request that is refused: status, message, OpenAI's code."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """One server on the loopback interface for all episodes of a leader, begun with the first of them.

    Lives in one event loop.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._runner: web.AppRunner | None = None
        self._start, self._url = asyncio.Lock(), ""
        self._told: set[str] = set()

    @asynccontextmanager
    async def open(self, episode: Episode) -> AsyncIterator[tuple[str, str]]:
        """(base URL, API key) of an episode, for as long as the context lasts."""
        async with self._start:
            if self._runner is None:
                await self._serve()
        key = secrets.token_hex(16)
        self._episodes[key] = episode
        try:
            yield self._url, key
        finally:
            del self._episodes[key]

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self) -> None:
        app = web.Application(client_max_size=LARGEST)
        app.add_routes([web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)])
        # a program that hangs up, or is killed, takes its request to the engines along
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    def _episode(self, request: web.Request) -> Episode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or key not in self._episodes:
            raise _Wrong(401, "the API key is of no episode under way", "invalid_api_key")
        return self._episodes[key]

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._episode(request)
        except _Wrong as wrong:
            return _error(wrong)
        return web.json_response({"object": "list", "data": [
            {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            episode, body = self._episode(request), await _json(request)
            self._tell(body)
            reply = await _ask(episode, body)
        except _Wrong as wrong:
            return _error(wrong)
        answer = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()),
                  "model": body.get("model") or MODEL}
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return await _stream(request, answer, reply, usage=bool(options.get("include_usage")))
        return web.json_response({**answer, "object": "chat.completion", "usage": _usage(reply), "choices": [
            {"index": 0, "message": _spoken(reply), "finish_reason": _finish(reply), "logprobs": None}]})

    def _tell(self, body: dict[str, Any]) -> None:
        """Say once what has no effect."""
        for name in _IGNORED:
            if body.get(name) is not None and name not in self._told:
                self._told.add(name)
                log.warning("the field %s of chat requests has no effect: the run decides how tokens are sampled", name)


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise _Wrong(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Wrong(400, "the body must be a JSON object")
    return body


async def _ask(episode: Episode, body: dict[str, Any]) -> Reply:
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise _Wrong(400, f"{name}={body[name]!r:.80} is not supported")
    tools = [] if body.get("tool_choice") == "none" else _optional(body, "tools", list) or []
    _optional(body, "stream_options", dict)
    limit = next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None)
    stop = [] if body.get("stop") is None else body["stop"]
    try:
        return await episode.ask([_message(one) for one in _list(body, "messages")], tools, max_tokens=limit,
                                 stop=stop)
    except NoRoom as full:
        raise _Wrong(400, str(full), "context_length_exceeded") from full
    except Refused as refused:
        raise _Wrong(400, str(refused)) from refused
    except (EnginesFailed, MegarlError) as error:
        raise _Wrong(503, str(error), "engines") from error


def _list(body: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(body.get(name), list) or not body[name]:
        raise _Wrong(400, f"{name} must be a list that is not empty")
    return body[name]


def _optional(body: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(body.get(name), kind | None):
        raise _Wrong(400, f"{name}={body[name]!r:.80} is of another form")
    return body.get(name)


def _message(message: Any) -> Message:
    """A message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Wrong(400, f"{message!r:.80} is not a chat message")
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text"
               or not isinstance(part.get("text"), str) for part in content):
            raise _Wrong(400, "only content of type text is supported")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content or ""}


def _spoken(reply: Reply) -> Message:
    """As OpenAI has it: no content beside calls alone."""
    message = dict(reply.message)
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.action.calls and reply.action.finish == "stop" else reply.action.finish


def _usage(reply: Reply) -> dict[str, Any]:
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.action.tokens,
            "total_tokens": reply.prompt_tokens + reply.action.tokens,
            "prompt_tokens_details": {"cached_tokens": reply.completion.cached_tokens}}


async def _stream(request: web.Request, answer: dict[str, Any], reply: Reply, usage: bool) -> web.StreamResponse:
    """The whole reply as one delta: engines are asked for whole replies."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    delta = _spoken(reply)
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                                    {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]}]
    if usage:
        chunks.append({"choices": [], "usage": _usage(reply)})
    for chunk in chunks:
        text = json.dumps({**answer, "object": "chat.completion.chunk", **chunk})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _error(wrong: _Wrong) -> web.Response:
    kind = "invalid_request_error" if wrong.status < 500 else "server_error"
    return web.json_response({"error": {"message": str(wrong), "type": kind, "param": None, "code": wrong.code}},
                             status=wrong.status)
