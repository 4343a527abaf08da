"""The part of the engines' protocol that brings weights, in front of a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megarl.rollout.relay.files import Copy, CopyRefused


class Relay:
    """The routes. Work on the copy is done in a thread, one piece at a time."""

    def __init__(self, copy: Copy) -> None:
        self._copy, self._turn = copy, asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI application."""
        post = ["POST"]
        return Starlette(routes=[
            Route("/health", self._health), Route("/model_info", self._model_info),
            Route("/begin_weight_update", self._begin, methods=post),
            Route("/update_weights_from_delta", self._from_delta, methods=post),
            Route("/end_weight_update", self._end, methods=post),
            Route("/update_weight_version", self._version, methods=post),
            Route("/weights_checker", self._checker, methods=post)])

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": str(self._copy.directory), "weight_version": self._copy.version,
                             "engine": "megarl-relay"})

    async def _begin(self, _: Request) -> Response:
        return await self._do(self._copy.begin)

    async def _from_delta(self, request: Request) -> Response:
        message = await request.body()
        return await self._do(lambda: self._copy.patch(message))

    async def _end(self, _: Request) -> Response:
        return await self._do(self._copy.end)

    async def _version(self, request: Request) -> Response:
        self._copy.version = str((await request.json())["new_version"])
        return JSONResponse({"success": True, "message": self._copy.version})

    async def _checker(self, _: Request) -> Response:
        async with self._turn:
            return JSONResponse({"success": True, "checksums": await asyncio.to_thread(self._copy.checksums)})

    async def _do(self, work: Callable[[], None]) -> Response:
        try:
            async with self._turn:
                await asyncio.to_thread(work)
        except CopyRefused as refused:
            return JSONResponse({"success": False, "message": str(refused)}, status_code=400)
        return JSONResponse({"success": True, "message": ""})
