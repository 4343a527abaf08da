"""SGLang 0.5.23's HTTP protocol in front of an engine. The event loop never computes: the engine has its own thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from megarl.rollout.embedded.engine import PAUSE_MODES, Engine
from megarl.rollout.embedded.requests import BadRequest, Generate, Limits, answer, parse_generate
from megarl.rollout.embedded.text import Text
from megarl.rollout.embedded.updates import UpdateRefused, WeightUpdater
from megarl.rollout.embedded.weights import Weights


class Server:
    """The routes.

    Args:
        engine: running.
        weights: for checksums.
        limits, text: for reading requests.
        model_path: told by /model_info.
    """

    def __init__(self, engine: Engine, weights: Weights, limits: Limits, text: Text | None, model_path: str) -> None:
        self._engine, self._weights, self._limits, self._text = engine, weights, limits, text
        self._model_path = model_path

    def app(self) -> Starlette:
        """The ASGI application. Wrong requests are answered by status 400 and SGLang's error object."""
        post, any_of = ["POST"], ["GET", "POST"]
        routes = [
            Route("/health", self._health), Route("/model_info", self._model_info),
            Route("/get_model_info", self._model_info), Route("/v1/loads", self._loads),
            Route("/generate", self._generate, methods=["POST", "PUT"]),
            Route("/abort_request", self._abort, methods=post),
            Route("/pause_generation", self._pause, methods=post),
            Route("/continue_generation", self._continue, methods=post),
            Route("/flush_cache", self._flush, methods=any_of),
            Route("/init_weights_update_group", self._init_group, methods=post),
            Route("/destroy_weights_update_group", self._destroy_group, methods=post),
            Route("/begin_weight_update", self._begin, methods=post),
            Route("/update_weights_from_distributed", self._from_distributed, methods=post),
            Route("/end_weight_update", self._end, methods=post),
            Route("/update_weights_from_disk", self._from_disk, methods=post),
            Route("/update_weights_from_delta", self._from_delta, methods=post),
            Route("/update_weight_version", self._version, methods=post),
            Route("/weights_checker", self._checker, methods=post)]
        return Starlette(routes=routes, exception_handlers={BadRequest: _bad_request, HTTPException: _http_error})

    async def _health(self, _: Request) -> Response:
        """200 while the process lives; says nothing about pauses or updates, so that a lease survives them."""
        return Response()

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self._model_path, "tokenizer_path": self._model_path, "is_generation": True,
                             "engine": "megarl-embedded", **self._engine.state()})

    async def _loads(self, _: Request) -> Response:
        """What a balancer needs of SGLang's answer."""
        state = self._engine.state()
        return JSONResponse({"loads": [{"dp_rank": 0, "num_running_reqs": state["running"],
                                        "num_waiting_reqs": state["waiting"]}]})

    async def _generate(self, request: Request) -> Response:
        generate = parse_generate(await _body(request), self._limits, self._text)
        done = asyncio.wrap_future(self._engine.generate(generate.groups))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not done.done():
            await self._abandon(generate)
        return JSONResponse(answer(generate, self._text))

    async def _abandon(self, generate: Generate) -> None:
        """The client hung up: what it asked for is not computed further."""
        groups = {id(group) for group in generate.groups}
        await asyncio.wrap_future(self._engine.abort(lambda sequence: id(sequence.group) in groups))

    async def _abort(self, request: Request) -> Response:
        """Aborts every request whose id begins with `rid`, as SGLang does."""
        body = await _body(request)
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
        if not everything and not isinstance(rid, str) or not (rid or everything):
            raise BadRequest("rid (a string) or abort_all is needed")
        await _wait(self._engine.abort(lambda sequence: everything or sequence.rid.startswith(rid)))
        return Response()

    async def _pause(self, request: Request) -> Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await _wait(self._engine.pause(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await _wait(self._engine.resume())
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _: Request) -> Response:
        flushed = await _wait(self._engine.flush())
        return PlainTextResponse(
            "Cache flushed.\n" if flushed else "Flush cache failed: requests are running.\n",
            status_code=200 if flushed else 400)

    async def _init_group(self, request: Request) -> Response:
        body = await _body(request)
        address, name = _get(body, "master_address", str), _get(body, "group_name", str, "weight_update_group")
        port, offset, size = (_get(body, field, int) for field in ("master_port", "rank_offset", "world_size"))
        backend = _get(body, "backend", str, "nccl")
        return await self._change(
            lambda updater: updater.init_group(address, port, offset, size, name, backend),
            "Succeeded to initialize custom process group.")

    async def _destroy_group(self, request: Request) -> Response:
        name = _get(await _body(request), "group_name", str, "weight_update_group")
        return await self._change(lambda updater: updater.destroy_group(name),
                                  "Succeeded to destroy custom process group.")

    async def _begin(self, _: Request) -> Response:
        return await self._change(WeightUpdater.begin, "Weight update begun.")

    async def _end(self, _: Request) -> Response:
        return await self._change(WeightUpdater.end, "Weight update ended.")

    async def _from_distributed(self, request: Request) -> Response:
        body = await _body(request)
        names, dtypes, shapes = _names(body, "names"), _names(body, "dtypes"), _shapes(body)
        group, form = _get(body, "group_name", str, "weight_update_group"), body.get("load_format")
        return await self._change(
            lambda updater: updater.receive(names, dtypes, shapes, group, form),
            "Succeeded to update parameter online.", flush=bool(body.get("flush_cache", True)),
            abort_all=bool(body.get("abort_all_requests")), version=_version_of(body))

    async def _from_disk(self, request: Request) -> Response:
        body = await _body(request)
        path = _get(body, "model_path", str)
        response = await self._change(
            lambda updater: updater.from_disk(path), "Succeeded to update model weights.",
            flush=bool(body.get("flush_cache", True)), abort_all=bool(body.get("abort_all_requests")),
            version=_version_of(body), num_paused_requests=0)
        return response

    async def _from_delta(self, request: Request) -> Response:
        """megarl's own: the body is a message of `megarl.sync.delta`."""
        message = await request.body()
        return await self._change(lambda updater: updater.patch(message, self._engine.state()["weight_version"]),
                                  "Succeeded to change weights.")

    async def _version(self, request: Request) -> Response:
        """As in SGLang, `abort_all_requests` is true unless the request says otherwise."""
        body = await _body(request)
        version = _get(body, "new_version", str)
        await _wait(self._engine.set_version(version, bool(body.get("abort_all_requests", True))))
        return JSONResponse(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _checker(self, request: Request) -> Response:
        """`checksum` is the one action: Hugging Face name -> `megarl.sync.checksum.tensor_checksum`."""
        action = (await _body(request)).get("action", "checksum")
        if action != "checksum":
            raise BadRequest(f"action {action!r} is not supported by the embedded engine, use checksum")
        checksums = await _wait(self._engine.read(self._weights.checksums))
        return JSONResponse({"success": True, "message": f"{len(checksums)} tensors", "checksums": checksums})

    async def _change(self, change: Callable[[WeightUpdater], None], message: str, *, flush: bool = False,
                      abort_all: bool = False, version: str | None = None, **more: Any) -> Response:
        """Have the engine run a change of its weights, and tell how it went."""
        try:
            await _wait(self._engine.update(change, flush=flush, abort_all=abort_all, version=version))
        except UpdateRefused as refused:
            return JSONResponse({"success": False, "message": str(refused), **more}, status_code=400)
        return JSONResponse({"success": True, "message": message, **more})


async def _wait(future: Future) -> Any:
    return await asyncio.wrap_future(future)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of the body; {} where there is none."""
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _get(body: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = body.get(name, default)
    if type(value) is not kind:
        raise BadRequest(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def _names(body: dict[str, Any], name: str) -> list[str]:
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise BadRequest(f"{name} must be a list of strings")
    return values


def _shapes(body: dict[str, Any]) -> list[list[int]]:
    shapes = body.get("shapes")
    if not isinstance(shapes, list) or not all(
            isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in shapes):
        raise BadRequest("shapes must be a list of lists of sizes")
    return shapes


def _version_of(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


async def _disconnected(request: Request) -> None:
    """Returns once the client has hung up; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bad_request(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def _http_error(_: Request, error: Exception) -> Response:
    """404 and 405, in the same form."""
    return JSONResponse({"error": {"message": error.detail}}, status_code=error.status_code)
