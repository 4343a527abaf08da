"""The one client of an engine: asynchronous, with a timeout on everything and no answer left unchecked.

aiohttp rather than httpx: 64 concurrent generate-sized requests cost it about a ninth of the CPU time.

What can go wrong is told apart, because it calls for different reactions: nobody answered (`EngineLost`: the request
may or may not have run), the engine said no (`EngineRefused`: the same request will be refused again), it is busy or
failed (`EngineFailed`), it answered nonsense (`BadAnswer`). Only calls that may safely run twice are sent again.
"""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.rollout.protocol import (
    BadAnswer,
    Completion,
    EngineError,
    Expected,
    GenerateRequest,
    InitGroup,
    ModelInfo,
    UpdateBucket,
    parse_generate,
)

BACKOFF_S = 0.2  # first pause before a call is sent again; doubles each time
BACKOFF_MOST_S = 5.0
KEEPALIVE_S = 2.0  # below uvicorn's 5 s: a connection that the server is closing must not be taken for a new request
_BUSY = (429, 503)


class EngineLost(EngineError):
    """No answer: refused or broken connection, or silence until the timeout."""

    reason = "lost"


class EngineTimeout(EngineLost):
    """Silence until the timeout: the request may still be running there."""

    reason = "timeout"


class EngineRefused(EngineError):
    """A 4xx status: this request is wrong in the engine's eyes, and would be again."""

    reason = "refused"


class EngineFailed(EngineError):
    """A 5xx status or 429, or `success: false`."""

    reason = "failed"


class EngineBusy(EngineFailed):
    """429 or 503: not now."""

    reason = "busy"


def backoff_s(attempt: int) -> float:
    """Seconds to wait before attempt `attempt` + 1 (attempts count from 0)."""
    return min(BACKOFF_MOST_S, BACKOFF_S * 2**attempt)


def open_session() -> aiohttp.ClientSession:
    """A connection pool for any number of engines; made and closed inside the running event loop."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S))


class EngineClient:
    """Talks to one engine.

    Args:
        url: `http://host:port`.
        session: from `open_session`; shared by all clients of an event loop.
        request_timeout_s: of a whole /generate.
        control_timeout_s: of every other call.
        connect_timeout_s: until the connection stands.
        keys: the engine's (`EngineRecord.keys`).
        retries: how often a call that may run twice is sent again after EngineLost or EngineBusy. /generate is
            not among them: the generator re-issues a group itself, on another engine where there is one.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, request_timeout_s: float = 300.0,
                 control_timeout_s: float = 60.0, connect_timeout_s: float = 10.0, retries: int = 3,
                 keys: Keys = NO_KEYS) -> None:
        self.url = url
        self._session = session
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._retries, self._keys = retries, keys

    async def generate(self, request: GenerateRequest, *, vocab_size: int,
                       expected: Expected | None = None) -> list[Completion]:
        """The request's completions, checked; with `expected`, also that those weights made them.

        Raises:
            EngineLost, EngineTimeout, EngineRefused, EngineFailed, BadAnswer, WrongVersion.
        """
        answer = await self._once("POST", "/generate", request.to_json(), self._request_timeout_s)
        completions = parse_generate(answer, request, vocab_size)
        if expected is not None:
            for completion in completions:
                expected.check(completion.versions)
        return completions

    async def abort(self, rid: str = "", *, timeout_s: float | None = None) -> None:
        """Stop the request whose rid begins with `rid`, or all if it is empty."""
        body = {"rid": rid, "abort_all": False} if rid else {"abort_all": True}
        await self._control("/abort_request", body, safe=True, timeout_s=timeout_s)

    async def pause(self, mode: str) -> None:
        """Stop generating: abort (requests end), retract (they go back to the queue) or in_place (frozen)."""
        await self._control("/pause_generation", {"mode": mode}, safe=True)

    async def continue_(self) -> None:
        """Undo `pause`."""
        await self._control("/continue_generation", {}, safe=True)

    async def flush(self) -> None:
        """Drop the KV cache; refused while requests run (so: after a retract or abort pause)."""
        await self._control("/flush_cache", {}, safe=True)

    async def init_group(self, group: InitGroup, *, timeout_s: float | None = None) -> None:
        """Join the process group; returns when the group stands, so the other ranks must join meanwhile."""
        await self._control("/init_weights_update_group", group.to_json(), needs_success=True, timeout_s=timeout_s)

    async def destroy_group(self, name: str) -> None:
        """Leave the process group."""
        await self._control("/destroy_weights_update_group", {"group_name": name}, needs_success=True)

    async def begin_update(self) -> None:
        """Open a weight update; buckets are refused outside one."""
        await self._control("/begin_weight_update", {}, needs_success=True)

    async def update_bucket(self, bucket: UpdateBucket, *, timeout_s: float | None = None) -> None:
        """Receive the bucket's tensors by broadcast and load them; returns when they are in place."""
        await self._control("/update_weights_from_distributed", bucket.to_json(), needs_success=True,
                            timeout_s=timeout_s)

    async def update_from_disk(self, path: str, *, load_format: str | None = None,
                               timeout_s: float | None = None) -> None:
        """Load the whole checkpoint that lies at `path` on the engine's host; needs no open update.

        SGLang without a `load_format` reads it as it read its own; the cache is not flushed.
        """
        await self._control("/update_weights_from_disk", {"model_path": path, "load_format": load_format,
                                                          "flush_cache": False}, needs_success=True,
                            timeout_s=timeout_s)

    async def update_from_delta(self, message: bytes, *, timeout_s: float | None = None) -> None:
        """Take a message of `megarl.sync.delta` within an open update (embedded engine)."""
        await self._control("/update_weights_from_delta", message, needs_success=True, timeout_s=timeout_s)

    async def end_update(self) -> None:
        """Close the weight update."""
        await self._control("/end_weight_update", {}, needs_success=True)

    async def set_version(self, version: str) -> None:
        """Name the weights; running requests go on (SGLang's own default would abort them)."""
        await self._control("/update_weight_version", {"new_version": version, "abort_all_requests": False},
                            safe=True, needs_success=True)

    async def checksums(self) -> dict[str, Any]:
        """The answer of /weights_checker to `checksum`."""
        return await self._control("/weights_checker", {"action": "checksum"}, safe=True, needs_success=True)

    async def model_info(self) -> ModelInfo:
        """Which model and weight version the engine serves."""
        return ModelInfo.from_json(await self._retrying("GET", "/model_info", None, self._control_timeout_s))

    async def kind(self) -> tuple[str, int]:
        """Which server this is, `embedded` or `sglang`, and how many ranks it has."""
        info = await self._retrying("GET", "/model_info", None, self._control_timeout_s)
        if isinstance(info, dict) and info.get("engine") == "megarl-embedded":
            return "embedded", 1
        sizes = await self._retrying("GET", "/server_info", None, self._control_timeout_s)
        try:
            return "sglang", int(sizes["tp_size"]) * int(sizes["pp_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.url}/server_info has no tp_size and pp_size") from error

    async def load(self) -> tuple[int, int]:
        """How many sequences the engine is running, and how many wait in its queue."""
        answer = await self._once("GET", "/v1/loads?include=core", None, self._control_timeout_s)
        try:
            parts = answer["loads"]  # one for each data-parallel rank of its attention
            return (sum(int(part["num_running_reqs"]) for part in parts),
                    sum(int(part["num_waiting_reqs"]) for part in parts))
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.url}/v1/loads has another form: {str(answer)[:200]}") from error

    async def health(self, *, timeout_s: float | None = None) -> None:
        """Returns if the engine answers with 200; one try."""
        await self._once("GET", "/health", None, timeout_s or self._control_timeout_s)

    async def _control(self, path: str, body: dict[str, Any] | bytes, *, safe: bool = False,
                       needs_success: bool = False, timeout_s: float | None = None) -> dict[str, Any]:
        """POST a control call; `safe`: may run twice; `needs_success`: the answer must say `success: true`."""
        send = self._retrying if safe else self._once
        answer = await send("POST", path, body, timeout_s or self._control_timeout_s, admin=True)
        if needs_success and not (isinstance(answer, dict) and answer.get("success") is True):
            raise BadAnswer(f"{self.url}{path} answered without success: {str(answer)[:200]}")
        return answer if isinstance(answer, dict) else {}

    async def _retrying(self, method: str, path: str, body: dict[str, Any] | bytes | None, timeout_s: float, *,
                        admin: bool = False) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return await self._once(method, path, body, timeout_s, admin=admin)
            except (EngineLost, EngineBusy):
                if attempt == self._retries:
                    raise
                await asyncio.sleep(backoff_s(attempt))

    async def _once(self, method: str, path: str, body: dict[str, Any] | bytes | None, timeout_s: float, *,
                    admin: bool = False) -> Any:
        """Send once; the decoded JSON of the answer, or its text where it is not JSON."""
        where = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(self._connect_timeout_s, timeout_s))
        content = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._session.request(method, where, **content, timeout=timeout,
                                             headers=self._keys.header(admin=admin)) as response:
                status, kind, raw = response.status, response.content_type, await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineLost(f"{where}: no connection within {timeout.sock_connect:g} s") from error
        except TimeoutError as error:
            raise EngineTimeout(f"{where}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{where}: {type(error).__name__}: {error}") from error
        return _checked(where, status, kind, raw)


def _checked(where: str, status: int, kind: str, raw: bytes) -> Any:
    text = raw.decode("utf-8", errors="replace")
    if status != 200:
        failure = EngineBusy if status in _BUSY else EngineRefused if 400 <= status < 500 else EngineFailed
        raise failure(f"{where}: status {status}: {text[:500]}")
    if kind != "application/json":
        return text
    try:
        answer = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadAnswer(f"{where}: not JSON: {text[:200]!r}") from error
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineFailed(f"{where}: {answer.get('message', 'success: false')}")
    return answer
