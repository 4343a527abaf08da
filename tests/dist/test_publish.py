"""Publishing from trainer layouts to real embedded engines: what arrives, and what happens when an engine fails."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ROOT
from models import config_for, save_hf_model
from safetensors.torch import load_file
from worlds import run_world

from megarl.config.layout import Layout
from megarl.rollout.process import engine_environment
from megarl.sync.checksum import tensor_checksum

TIMEOUT_S = 40.0
DENSE = dict(hidden_size=128, intermediate_size=256, vocab_size=2000)  # 3.9 MB: several buckets of 1 MiB


class EngineUnderTest:
    """An embedded engine in a process of its own."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "megarl.rollout.embedded", "--model-path", str(model), "--port", "0",
                   "--slots", "4", "--update-timeout", str(TIMEOUT_S), "--parent-pid", str(os.getpid())]
        env = {**engine_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Its address, once it is up."""
        while self._url is None:
            line = self.process.stdout.readline()
            assert line, "the engine ended"
            found = re.search(r"http://\S+", line)
            self._url = found and found.group()
        return self._url

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def call(url: str, path: str, body: dict | None = None) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode() if body is not None else None)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logprobs(url: str) -> list[float]:
    """Of 24 sampled tokens after two prompts; both engines draw the same ones."""
    found = []
    for prompt in ([5, 9, 3, 17, 2], [44, 8]):
        answer = call(url, "/generate", {"input_ids": prompt, "return_logprob": True, "sampling_params": {
            "max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}})
        found += [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
        assert {span["version"] for span in answer["meta_info"].get("weight_versions", [])} <= {
            answer["meta_info"]["weight_version"]}
    return found


def trainers(layout: Layout, model: Path, **sync: Any) -> tuple[Any, ...]:
    """(chunks, hf, config) of this rank, parallel state made."""
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf = HFConfig.read(model)
    config = config_for(model)
    config = config.model_copy(update={"sync": config.sync.model_copy(update={
        "bucket_mb": 1, "timeout_s": TIMEOUT_S, "verify": True, **sync}),
        "rollout": config.rollout.model_copy(update={"no_engine_timeout_s": 3.0})})
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, model, hf)
    return chunks, hf, config


class Registry:
    """The real registry, of one rollout rank, written by this test instead of a supervisor; on trainer 0 alone."""

    def __init__(self, rank: int) -> None:
        from megarl.rollout.fleet import Fleet, Registrar

        self.fleet = self.registrar = None
        if rank == 0:
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.registrar, self.fleet = Registrar(self.store, 0), Fleet(self.store, 1, 2, 1e6)

    def up(self, *urls: str | None) -> None:
        """Exactly these engines are up; the place in the list is the engine's number."""
        from megarl.rollout.fleet import EngineRecord

        for number, url in enumerate(urls if self.registrar else ()):
            self.registrar.write(EngineRecord(f"0.{number}", 1, url or "", "up" if url else "down"))

    def synced(self) -> list[str]:
        return [record.id for record in self.fleet.synced_engines()] if self.fleet else []

    def condemned(self) -> list[str]:
        return [name for name in ("0.0", "0.1") if self.registrar and self.registrar.condemned(name)[0]]


def publish_dense(rank: int, model: Path, export: Path, urls: list[str], pid: int) -> dict[str, Any]:
    """TP2 + SP x PP2 to two engines: twice well, then refused, with wrong sums, and with an engine killed."""
    from megatron.core import parallel_state as ps

    from megarl.checkpoint.hf_export import save_hf
    from megarl.errors import MachineFault
    from megarl.sync.publish import WeightPublisher

    layout = Layout(4, tensor=2, pipeline=2, sequence=True)
    chunks, hf, config = trainers(layout, model)
    registry, found = Registry(rank), {}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun
    publisher = WeightPublisher(chunks, hf, config, address="127.0.0.1", generation="g", fleet=registry.fleet)

    def fails(name: str, version: str) -> None:
        begun = time.monotonic()
        with pytest.raises(MachineFault) as error:
            publisher.publish(version)
        found[name] = str(error.value)
        found[f"{name} hung"] = time.monotonic() - begun > TIMEOUT_S / 2
        found[f"{name} registry"] = registry.synced(), registry.condemned()

    found["urls"] = urls
    if rank == 0:  # fills the engines' caches
        found["before"] = [logprobs(url) for url in urls]
    registry.up(*urls)
    tell, found["order"] = publisher._tell, []
    publisher._tell = lambda call, what: (found["order"].append(what), tell(call, what))
    first = publisher.publish("g:1")
    publisher._tell = tell
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(1.01)
    second = publisher.publish("g:2")
    save_hf(chunks, hf, layout, model, export)
    found["reports"] = [(r.version, [e.id for e in r.engines], r.tensors, r.bytes) for r in (first, second)]
    found["synced"] = registry.synced()
    torch.distributed.barrier()
    if rank == 0:
        found["sums"] = [call(url, "/weights_checker", {"action": "checksum"})["checksums"] for url in urls]
        found["versions"] = [call(url, "/model_info")["weight_version"] for url in urls]
        found["logprobs"] = [logprobs(url) for url in urls]

    registry.up(None, None)
    fails("nobody", "g:3")
    threading.Timer(1.0, registry.up, (urls[0], None)).start()  # as an engine that is starting again
    found["late"] = [engine.id for engine in publisher.publish("g:3").engines]

    send = publisher._send

    def end_before_sending() -> Any:
        if rank == 0:  # the engine will now refuse the bucket and not take part in its broadcast
            call(urls[0], "/end_weight_update", {})
        return send()

    publisher._send = end_before_sending
    fails("refused", "g:4")
    publisher._send = send

    summed = publisher._summed

    def wrong_sum(tensors: Any) -> Iterator:
        for name, tensor in summed(tensors):
            yield name, tensor
            if name == "model.norm.weight":
                publisher._sums[name] = "float32[128]:0"

    publisher._summed = wrong_sum
    fails("wrong", "g:5")
    publisher._summed = summed

    registry.up(*urls)

    def kill_while_sending() -> Any:
        push = publisher._transport.push if publisher._transport else None

        def push_and_kill(bucket: Any) -> None:
            push(bucket)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        if rank == 2:  # the second stage's source
            publisher._transport.push = push_and_kill
        return send()

    publisher._send = kill_while_sending
    fails("killed", "g:6")
    publisher._send = send

    if rank == 0:  # what restarting the survivor would do: out of the update that was cut short
        with contextlib.suppress(urllib.error.HTTPError):
            call(urls[1], "/end_weight_update", {})
    registry.up(None, urls[1])
    found["again"] = publisher.publish("g:7").version, registry.synced()
    found["again logprobs"] = logprobs(urls[1]) if rank == 0 else None
    publisher.close()
    ps.destroy_model_parallel()
    return found


def publish_moe(rank: int, model: Path, export: Path, url: str) -> None:
    """EP2 x PP2 (DP2) to one engine; weights that have changed since they were read."""
    from megatron.core import parallel_state as ps

    from megarl.checkpoint.hf_export import save_hf
    from megarl.sync.publish import WeightPublisher

    layout = Layout(4, pipeline=2, expert=2, placement="mirrored", chunks=2)
    chunks, hf, config = trainers(layout, model)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(0.98)
    registry = Registry(rank)
    registry.up(url, None)
    publisher = WeightPublisher(chunks, hf, config, address="127.0.0.1", generation="m", fleet=registry.fleet)
    publisher.publish("m:1")
    publisher.close()
    save_hf(chunks, hf, layout, model, export)
    ps.destroy_model_parallel()


def publish_all(rank: int, dense: tuple, moe: tuple) -> dict[str, Any]:
    publish_moe(rank, *moe)
    return publish_dense(rank, *dense)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("publish")
    dense, other = (save_hf_model("llama", root / f"dense{seed}", seed, **DENSE) for seed in (0, 1))
    moe, other_moe = (save_hf_model("qwen3_moe", root / f"moe{seed}", seed) for seed in (0, 1))
    engines = [EngineUnderTest(path) for path in (other, other, other_moe)]
    try:
        urls = [engine.url for engine in engines]
        ranks = run_world(4, publish_all, (dense, root / "dense_export", urls[:2], engines[0].process.pid),
                          (moe, root / "moe_export", urls[2]))
        fresh = [EngineUnderTest(root / "dense_export"), EngineUnderTest(root / "moe_export")]
        engines += fresh
        yield {"ranks": ranks, "root": root, "moe": urls[2], "fresh": [engine.url for engine in fresh]}
    finally:
        for engine in engines:
            engine.stop()


def test_engines_equal_a_fresh_one_on_the_export(published):
    zero, tensors = published["ranks"][0], exported(published["root"] / "dense_export")
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    assert zero["sums"] == [expected, expected] and zero["versions"] == ["g:2", "g:2"]
    fresh = logprobs(published["fresh"][0])
    assert zero["logprobs"] == [fresh, fresh] and zero["again logprobs"] == fresh and len(set(fresh)) == 24
    assert not set(zero["before"][0]) & set(fresh)
    size = sum(tensor.nbytes for tensor in tensors.values())
    for found in published["ranks"]:
        assert found["reports"] == [(f"g:{n}", ["0.0", "0.1"], len(tensors), size) for n in (1, 2)]
        assert found["order"] == ["pause", "drop caches", "begin an update", "end the update", "verify the weights",
                                  "name the weights", "continue"]
    assert size > 3 << 20 and zero["synced"] == ["0.0", "0.1"]


def test_expert_parallel_weights(published):
    tensors = exported(published["root"] / "moe_export")
    held = call(published["moe"], "/weights_checker", {"action": "checksum"})["checksums"]
    assert held == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    assert logprobs(published["moe"]) == logprobs(published["fresh"][1])


def test_failures_name_the_engine_on_every_rank_and_nobody_hangs(published):
    for rank, found in enumerate(published["ranks"]):
        assert "no engine has been up for 3 s" in found["nobody"] and found["late"] == ["0.0"]
        first = found["urls"][0]
        assert first in found["refused"] and "between begin_weight_update() and end_weight_up" in found["refused"]
        assert f"{first}: 1 of 39 tensors differ from what was sent: model.norm.weight" in found["wrong"]
        assert first in found["killed"]
        assert not any(found[f"{name} hung"] for name in ("nobody", "refused", "wrong", "killed"))
        assert found["again"] == ("g:7", ["0.1"] if rank == 0 else [])
    zero = published["ranks"][0]
    assert zero["nobody registry"] == ([], []) and zero["refused registry"] == ([], ["0.0"])
    assert zero["wrong registry"] == ([], ["0.0"]) and zero["killed registry"] == ([], ["0.0", "0.1"])
