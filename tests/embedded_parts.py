"""What the embedded engine's tests share: an engine without a server, and a server process with a plain HTTP client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# As if started by torchrun: nothing of it may reach the engine's process groups.
TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def scheduler_for(path: Path | str, slots: int = 64, text: Any = None, dtype: str = "float32",
                  routing: bool = False, prefix_tokens: int = 0) -> Any:
    """A scheduler over the checkpoint, version "v0"; `routing`: it records experts."""
    import torch

    from megarl.model.hf_config import HFConfig
    from megarl.rollout.embedded.decoder import Decoder
    from megarl.rollout.embedded.scheduler import Scheduler
    from megarl.rollout.embedded.weights import Weights

    hf = HFConfig.read(path)
    weights = Weights(hf, getattr(torch, dtype))
    weights.load_checkpoint(path)
    return Scheduler(Decoder(weights, routing), slots, hf.eos_ids, text, "v0", prefix_tokens)


def submit(scheduler: Any, body: dict[str, Any], vocab: int = 99, context: int = 2048, text: Any = None,
           routing: bool = False) -> Any:
    """Queue a /generate body; `answer_of` gives its items later."""
    from megarl.rollout.embedded.requests import Limits, parse_generate

    generate = parse_generate({"return_logprob": True, **body}, Limits(vocab, context, routing), text)
    for group in generate.groups:
        scheduler.submit(group)
    return generate


def answer_of(generate: Any, text: Any = None) -> list[dict[str, Any]]:
    """The items of the answer, always as a list."""
    from megarl.rollout.embedded.requests import answer

    items = answer(generate, text)
    return items if isinstance(items, list) else [items]


def run(scheduler: Any, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Generate to the end."""
    generate = submit(scheduler, body, **more)
    while scheduler.step():
        pass
    return answer_of(generate, more.get("text"))


def ids_of(item: dict[str, Any]) -> list[int]:
    """Output tokens of an answer's item, checked against its log-probs' token ids."""
    assert item["output_ids"] == [token for _, token, _ in item["meta_info"]["output_token_logprobs"]]
    return item["output_ids"]


def logprobs_of(item: dict[str, Any]) -> list[float]:
    """Log-probs of an answer's item."""
    return [logprob for logprob, _, _ in item["meta_info"]["output_token_logprobs"]]


class EngineServer:
    """`python -m megarl.rollout.embedded` as a child process; a context manager. `log`: its output so far."""

    def __init__(self, path: Path | str, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rollout.embedded", "--model-path", str(path), "--port", str(self.port),
             "--parent-pid", str(os.getpid()), *arguments],
            cwd=ROOT, env={**os.environ, **TORCHRUN}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> EngineServer:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.stdout.read()
            try:
                assert self.get("/health")[0] == 200
                return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the engine did not come up")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def get(self, path: str) -> tuple[int, Any]:
        """(status, JSON or text)."""
        return self._send(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"))

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        return self._send(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method="POST"))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _decoded(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read())

    def good(self, path: str, body: Any = None) -> Any:
        """POST that must be answered by 200 (and no `success: false`)."""
        status, answer = self.post(path, body)
        assert status == 200 and not (isinstance(answer, dict) and answer.get("success") is False), (status, answer)
        return answer

    def generate(self, body: dict[str, Any]) -> Any:
        """/generate with log-probs; the items as a list."""
        answer = self.good("/generate", {"return_logprob": True, **body})
        return answer if isinstance(answer, list) else [answer]

    def until(self, condition: Any) -> dict[str, Any]:
        """Poll /model_info until `condition` holds of it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            info = self.get("/model_info")[1]
            if condition(info):
                return info
            time.sleep(0.005)
        raise AssertionError(f"it did not come to be: {info}")


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()
