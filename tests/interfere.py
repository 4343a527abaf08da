"""Between trainers and engines: a proxy that spoils answers to order, and hosts whose network can be cut."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web


def _items(raw: bytes) -> list[dict[str, Any]]:
    answer = json.loads(raw)
    return answer if isinstance(answer, list) else [answer]


def _spoiled(kind: str, raw: bytes) -> bytes:
    """The answer of /generate, wrong in one way."""
    items = _items(raw)
    item = items[-1]
    if kind == "html":
        return b"<html>502 Bad Gateway</html>"
    if kind == "half":
        return raw[:len(raw) // 2]
    if kind == "one sample less":
        items.pop()
    elif kind == "other tokens":
        item["output_ids"][0] = (item["output_ids"][0] + 1) % 32
    elif kind == "token out of range":
        item["output_ids"][0] = item["meta_info"]["output_token_logprobs"][0][1] = 10**6
    elif kind == "a log-prob less":
        item["meta_info"]["output_token_logprobs"].pop()
    elif kind == "NaN":
        item["meta_info"]["output_token_logprobs"][0][0] = float("nan")
    elif kind == "other weights":
        item["meta_info"]["weight_version"] = "another.0.life:7"
        item["meta_info"]["weight_versions"] = [
            {"version": "another.0.life:7", "start": 0, "end": len(item["output_ids"])}]
    elif kind == "gap in versions":
        item["meta_info"]["weight_versions"] = [{**item["meta_info"]["weight_versions"][0], "start": 1}]
    elif kind == "another prompt":
        item["meta_info"]["prompt_tokens"] += 1
    else:
        raise ValueError(kind)
    return json.dumps(items).encode()


SPOILED = ("html", "half", "one sample less", "other tokens", "token out of range", "a log-prob less", "NaN",
           "other weights", "gap in versions", "another prompt")
OTHERWISE = ("status 500", "status 503", "cut", "silence")


class Proxy:
    """Passes everything on to an engine; of the answers to /generate it spoils some. A context manager.

    Args:
        target: the engine's url.
        seed, share: which answers, and how many of them.

    Attributes:
        url: its own.
        done: how often each kind was done.
    """

    def __init__(self, target: str, seed: int, share: float) -> None:
        self._target, self._rng, self._share = target, random.Random(seed), share
        self.done: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        kind = None
        if request.path == "/generate" and self._rng.random() < self._share:
            kind = self._rng.choice(SPOILED + OTHERWISE)
            self.done[kind] += 1
        headers = {name: value for name, value in request.headers.items() if name in ("Authorization", "Content-Type")}
        try:
            async with self._session.request(request.method, f"{self._target}{request.rel_url}",
                                             data=await request.read(), headers=headers) as answer:
                status, content_type, raw = answer.status, answer.content_type, await answer.read()
        except aiohttp.ClientError:
            request.transport.close()
            return web.Response()
        if kind in SPOILED and status == 200:
            raw = _spoiled(kind, raw)
        elif kind == "cut":
            request.transport.close()
        elif kind == "silence":
            await asyncio.sleep(3600)
        elif kind is not None and kind.startswith("status"):
            status = int(kind.split()[1])
        return web.Response(body=raw, status=status, content_type=content_type)

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        hanging = asyncio.all_tasks() - {asyncio.current_task()}  # those that are silent
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def no_namespaces() -> str:
    """Why network namespaces cannot be made here; "" if they can."""
    if os.geteuid():
        return "network namespaces need root"
    name = f"mgtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Host:
    """A "host" of its own: a network namespace on a bridge.

    Attributes:
        address: its own.
        prefix: words that run a command there, under a host name that stands for this address.
    """

    def __init__(self, name: str, number: int, subnet: str, folder: Path) -> None:
        self.name, self.address, self._link = f"{name}{number}", f"{subnet}.1{number}", f"{name}v{number}"
        hosts = folder / f"hosts{number}"
        hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        self.prefix = ("nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount", "sh", "-c",
                       f'hostname {self.name}; mount --bind {hosts} /etc/hosts; exec "$@"', "-")

    def cut(self) -> None:
        """Lose every packet from now on; nobody is told."""
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        """Pass packets again."""
        _ip("link", "set", self._link, "up")


@contextmanager
def hosts(count: int, folder: Path, subnet: str = "10.79.3") -> Iterator[list[Host]]:
    """So many hosts that this one reaches, and that reach this one."""
    name = f"mg{os.getpid() % 10000}x"
    bridge, made = f"{name}b", [Host(name, number, subnet, folder) for number in range(1, count + 1)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in made:
            _ip("netns", "add", host.name)
            _ip("link", "add", host._link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host._link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", host.name, "link", "set", link, "up")
            _ip("-n", host.name, "route", "add", "default", "via", f"{subnet}.1")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            subprocess.run(["ip", "link", "del", host._link], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
