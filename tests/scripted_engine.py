"""An engine that speaks the protocol and misbehaves to order: for faults that a real engine cannot be made to show.

Its "model" is a pure function of the sampling seed (`tokens_of`), so a test knows what every sample must be. Faults are
ordered over HTTP (`POST /fault`) or by calling `ScriptedEngine.order`. Run as a program it takes a real engine's
command line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
from aiohttp import web

VOCAB = 100


def tokens_of(seed: int, most: int) -> list[int]:
    """The response to any prompt under `seed`: 1 to `most` tokens; shorter than `most` means that it stopped."""
    draws = np.random.default_rng(seed)
    return draws.integers(0, VOCAB, size=draws.integers(1, most + 1)).tolist()


def logprob_of(token: int) -> float:
    """The "log-prob" of a token."""
    return -(token + 1) / 8.0


class ScriptedEngine:
    """State and handlers.

    Attributes:
        version: weight version in answers.
        delay_s: time that a request takes.
        requests: bodies of /generate, in order of arrival.
        running, most_running: requests now and at most at once.
        aborted: rids that were aborted.
        control_calls: by their paths, in order.
        size: ranks that it says it has, as SGLang; None: an embedded engine.
    """

    size: int | None = None

    def __init__(self, version: str = "own", delay_s: float = 0.0) -> None:
        self.version, self.delay_s = version, delay_s
        self.requests: list[dict] = []
        self.running = self.most_running = 0
        self.aborted: list[str] = []
        self.control_calls: list[str] = []
        self._faults: list[dict] = []

    def order(self, kind: str, *, times: int = 10**9, first_token: int | None = None) -> None:
        """Answer the next `times` requests (only those whose prompt begins with `first_token`) with a fault."""
        self._faults.append({"kind": kind, "times": times, "first_token": first_token})

    def _fault_for(self, body: dict) -> str | None:
        for fault in self._faults:
            if fault["times"] > 0 and fault["first_token"] in (None, body["input_ids"][0]):
                fault["times"] -= 1
                return fault["kind"]
        return None

    def _answer(self, body: dict, version: str) -> list[dict]:
        params, items = body["sampling_params"], []
        most = params["max_new_tokens"]
        for seed in params.get("sampling_seed", range(params["n"])):
            ids = tokens_of(seed, most)
            items.append({"text": "", "output_ids": ids, "meta_info": {
                "id": body["rid"], "finish_reason": {"type": "length" if len(ids) == most else "stop"},
                "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids), "cached_tokens": 0,
                "weight_version": version, "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[logprob_of(token), token, None] for token in ids]}})
        return items

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        body = await request.json()
        self.requests.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            fault = self._fault_for(body)
            if fault == "hang":
                await asyncio.sleep(3600)
            await asyncio.sleep(self.delay_s)
            return self._reply(request, body, fault)
        finally:
            self.running -= 1

    def _reply(self, request: web.Request, body: dict, fault: str | None) -> web.StreamResponse:
        if fault in ("400", "500", "503"):
            return web.json_response({"error": f"ordered {fault}"}, status=int(fault))
        if fault == "cut":  # the connection breaks in the middle of the answer
            request.transport.close()
        if fault == "html":
            return web.Response(text="<html>a proxy says hello</html>", content_type="application/json")
        items = self._answer(body, "other:0" if fault == "wrong_version" else self.version)
        meta = items[0]["meta_info"]
        if fault == "missing":
            items.pop()
        elif fault == "no_logprobs":
            del meta["output_token_logprobs"]
        elif fault == "short_logprobs":
            meta["output_token_logprobs"].pop()
        elif fault == "other_tokens":
            items[0]["output_ids"][0] = (items[0]["output_ids"][0] + 1) % VOCAB
        elif fault == "nan":
            meta["output_token_logprobs"][0][0] = float("nan")
        elif fault == "out_of_range":
            items[0]["output_ids"][0] = meta["output_token_logprobs"][0][1] = VOCAB
        elif fault == "abort":  # with half of the tokens
            meta["finish_reason"]["type"], half = "abort", len(items[0]["output_ids"]) // 2
            for tokens in (items[0]["output_ids"], meta["output_token_logprobs"]):
                del tokens[half:]
            meta["completion_tokens"] = meta["weight_versions"][0]["end"] = half
        return web.json_response(items)

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort_request."""
        self.aborted.append((await request.json()).get("rid", "all"))
        return web.Response()

    async def fault(self, request: web.Request) -> web.Response:
        """POST /fault: the arguments of `order`."""
        body = await request.json()
        self.order(body.pop("kind"), **body)
        return web.Response()

    async def set_version(self, request: web.Request) -> web.Response:
        """POST /update_weight_version."""
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.version})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        """GET /model_info."""
        return web.json_response({"model_path": "scripted", "weight_version": self.version,
                                  **({"engine": "megarl-embedded"} if self.size is None else {})})

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info."""
        return web.json_response({"tp_size": self.size, "pp_size": 1})

    async def note_call(self, request: web.Request) -> web.Response:
        """A control call: noted, and done."""
        self.control_calls.append(request.path.strip("/"))
        return web.json_response({"success": True})

    async def loads(self, request: web.Request) -> web.Response:
        """GET /v1/loads."""
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def stats(self, request: web.Request) -> web.Response:
        """GET /stats: what happened, and the environment."""
        return web.json_response({"requests": len(self.requests), "pid": os.getpid(), "env": dict(os.environ)})

    def app(self) -> web.Application:
        """The server."""
        app = web.Application()
        app.add_routes([
            web.post("/generate", self.generate), web.post("/abort_request", self.abort),
            web.post("/fault", self.fault), web.post("/update_weight_version", self.set_version),
            web.post("/end_weight_update", self.note_call), web.post("/continue_generation", self.note_call),
            web.get("/server_info", self.server_info), web.get("/model_info", self.model_info),
            web.get("/stats", self.stats), web.get("/health", self.health), web.get("/v1/loads", self.loads)])
        return app


class Serving:
    """A scripted engine served from a thread of this process. A context manager; `url` is where."""

    def __init__(self, engine: ScriptedEngine, port: int = 0) -> None:
        self.engine, self._port = engine, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Stop listening and cut all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    async def _end(self) -> None:
        await self._runner.cleanup()
        hanging = asyncio.all_tasks() - {asyncio.current_task()}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def main() -> None:
    """The program; beside a real engine's options: how to misbehave at the start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-version")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--exit", type=int, help="end at once with this status")
    parser.add_argument("--clash-status", type=int, default=1, help="status to end with if the port is taken")
    parser.add_argument("--tell-pid", action="store_true")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, and have a child that does too")
    options, _ = parser.parse_known_args()
    if options.exit is not None:
        print("loading\nerror: config.json: no such model\n  remedy: name one that exists", file=sys.stderr)
        sys.exit(options.exit)
    if options.tell_pid:
        print(f"pid {os.getpid()}", flush=True)
    if options.stubborn:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    engine = ScriptedEngine(options.weight_version, options.delay)
    try:
        web.run_app(engine.app(), host=options.host, port=options.port, print=None,
                    handle_signals=not options.stubborn)
    except OSError:
        print(f"error: port {options.port} is taken", file=sys.stderr)
        sys.exit(options.clash_status)


if __name__ == "__main__":
    main()
