"""Publishing from trainer layouts to real embedded engines, by each transport: what arrives, and what is refused."""

from __future__ import annotations

import datetime
import json
import os
import re
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

    def __init__(self, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "megarl.rollout.embedded", "--model-path", str(model), "--port", "0",
                   "--slots", "4", "--update-timeout", str(TIMEOUT_S), "--parent-pid", str(os.getpid()),
                   *options]
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


def trainers(layout: Layout, model: Path, dtype: str = "fp32", **sync: Any) -> tuple[Any, ...]:
    """(chunks, hf, config) of this rank, parallel state made."""
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf = HFConfig.read(model)
    config = config_for(model, dtype=dtype)
    config = config.model_copy(update={"sync": config.sync.model_copy(update={
        "bucket_mb": 1, "timeout_s": TIMEOUT_S, "verify": True, **sync}),
        "rollout": config.rollout.model_copy(update={"no_engine_timeout_s": 3.0})})
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, model, hf)
    return chunks, hf, config


class Registry:
    """The real registry, of one rollout rank, written by this test instead of a supervisor; on trainer 0 alone."""

    NAMES = ("0.0", "0.1", "0.2")

    def __init__(self, rank: int) -> None:
        from megarl.rollout.fleet import Fleet, Registrar

        self.fleet = self.registrar = None
        if rank == 0:
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.registrar, self.fleet = Registrar(self.store, 0), Fleet(self.store, 1, 3, 1e6)

    def up(self, *urls: str | None, incarnation: int = 1) -> None:
        """Exactly these engines are up; the place in the list is the engine's number."""
        from megarl.rollout.fleet import EngineRecord

        for name, url in zip(self.NAMES, (*urls, None, None), strict=False) if self.registrar else ():
            self.registrar.write(EngineRecord(name, incarnation, url or "", "up" if url else "down"))

    def synced(self) -> list[str]:
        return [record.id for record in self.fleet.synced_engines()] if self.fleet else []

    def condemned(self) -> list[str]:
        return [name for name in self.NAMES if self.registrar and self.registrar.condemned(name)[0]]


def scale(chunks: list[torch.nn.Module], factor: float) -> None:
    """Other weights, as a step of training leaves them."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def held(urls: list[str]) -> tuple[list[dict[str, str]], list[str], list[bool]]:
    """Checksums, versions and whether they serve, of each engine."""
    infos = [call(url, "/model_info") for url in urls]
    sums = [call(url, "/weights_checker", {"action": "checksum"})["checksums"] for url in urls]
    serving = [info["weights_whole"] and not info["paused"] for info in infos]
    return sums, [info["weight_version"] for info in infos], serving


class Ways:
    """One trainer rank that publishes by one transport after the other to the same engines; what it finds."""

    def __init__(self, rank: int, layout: Layout, model: Path, urls: list[str], **sync: Any) -> None:
        self.rank, self.layout, self.model, self.urls = rank, layout, model, urls
        self.chunks, self.hf, self.config = trainers(layout, model, engines_per_set=1, **sync)
        self.lives, self.found = 0, {}

    def publisher(self, way: str, registry: Registry, **sync: Any) -> Any:
        from megarl.sync.publish import WeightPublisher

        config = self.config.model_copy(update={"sync": self.config.sync.model_copy(update={"transport": way, **sync})})
        self.lives += 1  # groups must not be named as those of the publisher before
        return WeightPublisher(self.chunks, self.hf, config, address="127.0.0.1", generation=f"life{self.lives}",
                               fleet=registry.fleet)

    def export(self, way: str, folder: Path) -> None:
        """The trainers' weights as a checkpoint, and what the engines hold."""
        from megarl.checkpoint.hf_export import save_hf

        save_hf(self.chunks, self.hf, self.layout, self.model, folder / way)
        torch.distributed.barrier()
        if self.rank == 0:
            self.found[way] = held(self.urls), [logprobs(url) for url in self.urls]

    def twice(self, way: str, folder: Path, **sync: Any) -> None:
        """Two versions, of which the second differs in every layer; the delta transport sends it as changes."""
        registry = Registry(self.rank)
        registry.up(*self.urls)
        publisher = self.publisher(way, registry, **sync)
        scale(self.chunks, 0.98)
        reports = [publisher.publish(f"{way}:1")]
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.view(-1)[::7] += 0.001
        reports.append(publisher.publish(f"{way}:2"))
        self.found[f"{way} reports"] = [(report.version, [engine.id for engine in report.engines], report.tensors,
                                         report.bytes, report.lost) for report in reports]
        publisher.close()
        self.export(way, folder)


def publish_dense(rank: int, model: Path, folder: Path, urls: list[str]) -> dict[str, Any]:
    """TP2 + SP x PP2 to two engines, each a set of its own."""
    from megatron.core import parallel_state as ps

    ways = Ways(rank, Layout(4, tensor=2, pipeline=2, sequence=True), model, urls[:2])
    found = ways.found
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun
    if rank == 0:  # fills the engines' caches
        found["before"] = [logprobs(url) for url in ways.urls]
    for way in ("disk", "delta", "broadcast"):
        ways.twice(way, folder, directory=str(folder / "versions"))
    found["files"] = sorted(str(path.relative_to(folder)) for path in (folder / "versions").rglob("*.safetensors"))
    overlap(ways)
    come_late_and_fail(ways, urls)
    ps.destroy_model_parallel()
    return found


def overlap(ways: Ways) -> None:
    """What engines get is the weights as they were at the start, whatever the trainers do meanwhile."""
    registry, found = Registry(ways.rank), ways.found
    registry.up(*ways.urls)
    for way in ("broadcast", "delta"):
        publisher = ways.publisher(way, registry, overlap=True)
        crew, began, go_on = publisher._crew, threading.Event(), threading.Event()
        tell = crew.tell

        def hold(targets: Any, call: Any, what: str, tell: Any = tell, began: Any = began, go_on: Any = go_on) -> None:
            if what == "begin an update":  # the engines are paused; nothing was sent yet
                began.set()
                assert go_on.wait(60)
            tell(targets, call, what)

        crew.tell = hold
        publisher.start(f"{way}:3")
        assert began.wait(60)
        if ways.rank == 0:
            found[f"{way} overlap before"] = [call(url, "/model_info")["weight_version"] for url in ways.urls]
        parameters = [parameter for chunk in ways.chunks for parameter in chunk.parameters()]
        before, summed = [parameter.detach().clone() for parameter in parameters], torch.ones(1)
        torch.distributed.all_reduce(summed)  # the training goes on
        scale(ways.chunks, 1.5)
        go_on.set()
        report = publisher.finish()
        assert publisher.finish() is None and len(report.engines) == 2 and summed == 4
        if ways.rank == 0:
            found[f"{way} overlap"] = held(ways.urls)
        publisher.close()
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


def come_late_and_fail(ways: Ways, urls: list[str]) -> None:
    """Nobody; one that comes late; others that join between two publishes; refusals, which cost their own set only."""
    from megarl.errors import MachineFault

    registry, found = Registry(ways.rank), ways.found
    publisher = ways.publisher("broadcast", registry)
    assert publisher.catch_up() is None  # nothing was published

    def fails(name: str, version: str) -> None:
        begun = time.monotonic()
        with pytest.raises(MachineFault) as error:
            publisher.publish(version)
        found[name] = str(error.value), registry.synced(), registry.condemned()
        found[f"{name} hung"] = time.monotonic() - begun > TIMEOUT_S / 2

    fails("nobody", "b:1")
    threading.Timer(1.0, registry.up, (urls[0],)).start()  # as an engine that is starting again
    found["late"] = [engine.id for engine in publisher.publish("b:1").engines]
    assert publisher.catch_up() is None
    registry.up(*urls)
    joined = publisher.catch_up()
    found["joined"] = [engine.id for engine in joined.engines], joined.version, registry.synced()
    assert publisher.catch_up() is None
    torch.distributed.barrier()
    if ways.rank == 0:
        found["joined sums"] = held(urls)

    groups = {one.number for one in publisher._sets}
    scale(ways.chunks, 1.01)
    publisher.publish("b:2")
    found["groups"] = len(groups), len(groups & {one.number for one in publisher._sets}), len(publisher._sets)

    send = publisher._transport.send

    def end_before_sending(targets: Any, tensors: Any) -> Any:
        if ways.rank == 0:  # the engine will now refuse the bucket and not take part in its broadcast
            call(urls[0], "/end_weight_update", {})
        return send(targets, tensors)

    publisher._transport.send = end_before_sending
    report = publisher.publish("b:3")
    found["refused"] = ([engine.id for engine in report.engines], {key.id: why for key, why in report.lost.items()},
                        registry.synced(), registry.condemned())
    publisher._transport.send = send
    summed = publisher._summed

    def wrong_sum(tensors: Any) -> Iterator:
        for name, tensor in summed(tensors):
            yield name, tensor
            if name == "model.norm.weight" and tensor is not None:
                publisher._sums[name] = "float32[128]:0"

    publisher._summed = wrong_sum
    fails("wrong", "b:4")
    publisher.close()


def publish_moe(rank: int, model: Path, folder: Path, url: str) -> dict[str, Any]:
    """EP2 x PP2 (DP2), mirrored, to one engine."""
    from megatron.core import parallel_state as ps

    from megarl.sync import disk

    disk.SHARD_BYTES = 40_000  # several files of each stage
    ways = Ways(rank, Layout(4, pipeline=2, expert=2, placement="mirrored", chunks=2), model, [url])
    for way in ("broadcast", "delta", "disk"):
        ways.twice(way, folder, directory=str(folder / "versions"))
    ways.found["files"] = sorted(str(path) for path in (folder / "versions").rglob("*.safetensors"))
    ps.destroy_model_parallel()
    return ways.found


def publish_all(rank: int, dense: tuple, moe: tuple) -> tuple[dict[str, Any], dict[str, Any]]:
    return publish_dense(rank, *dense), publish_moe(rank, *moe)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("publish")
    dense, other = (save_hf_model("llama", root / f"dense{seed}", seed, **DENSE) for seed in (0, 1))
    moe, other_moe = (save_hf_model("qwen3_moe", root / f"moe{seed}", seed) for seed in (0, 1))
    engines = [EngineUnderTest(path) for path in (other, other, other, other_moe)]
    try:
        urls = [engine.url for engine in engines]
        ranks = run_world(4, publish_all, (dense, root / "dense", urls[:3]), (moe, root / "moe", urls[3]))
        fresh = {kind: EngineUnderTest(root / kind / "broadcast") for kind in ("dense", "moe")}
        engines += fresh.values()
        yield {"dense": [found for found, _ in ranks], "moe": [found for _, found in ranks], "root": root,
               "fresh": {kind: engine.url for kind, engine in fresh.items()}}
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize("way", ["broadcast", "disk", "delta"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_engines_hold_every_tensor_and_compute_as_a_fresh_one(published, kind: str, way: str):
    ranks, count = published[kind], {"dense": 2, "moe": 1}[kind]
    tensors = exported(published["root"] / kind / way)
    expected, size = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}, sum(
        tensor.nbytes for tensor in tensors.values())
    (sums, versions, serving), found = ranks[0][way]
    assert sums == [expected] * count and versions == [f"{way}:2"] * count and all(serving)
    for rank in ranks:
        for number, (version, engines, sent, travelled, lost) in enumerate(rank[f"{way} reports"], 1):
            assert (version, engines, sent) == (f"{way}:{number}", ["0.0", "0.1"][:count], len(tensors)) and not lost
            if way != "delta":
                assert travelled == size
            else:  # 1 in 7 elements, in fp32
                assert size < travelled < 1.1 * size if number == 1 else travelled < 0.35 * size, (travelled, size)
    assert len(set(found[0])) == 24
    if way == "broadcast":  # the fresh engine's weights
        assert found == [logprobs(published["fresh"][kind])] * count
    if kind == "dense":
        assert size > 3 << 20 and not set(ranks[0]["before"][0]) & set(found[0])


def test_the_disk_keeps_one_version(published):
    (folder,) = {Path(file).parent.name for file in published["dense"][0]["files"]}
    assert folder == "weights-disk-2" and len(published["dense"][0]["files"]) == 2  # one of each stage
    assert len(published["moe"][0]["files"]) > 4


@pytest.mark.parametrize("way", ["broadcast", "delta"])
def test_overlapped_engines_get_the_weights_of_the_start(published, way: str):
    zero = published["dense"][0]
    sums, versions, serving = zero[f"{way} overlap"]
    assert versions == [f"{way}:3"] * 2 and all(serving) and f"{way}:3" not in zero[f"{way} overlap before"]
    assert sums == zero["broadcast"][0][0]  # those of before


def test_engines_that_come_late_or_between_publishes(published):
    for rank, found in enumerate(published["dense"]):
        assert found["late"] == ["0.0"] and "no engine has been up for 3 s" in found["nobody"][0]
        assert found["joined"][:2] == (["0.1", "0.2"], "b:1")
        assert found["groups"] == (1, 1, 3)  # the engine that stayed kept its group
        assert rank or found["joined"][2] == ["0.0", "0.1", "0.2"]
    sums, versions, serving = published["dense"][0]["joined sums"]
    assert sums[0] == sums[1] == sums[2] and versions == ["b:1"] * 3 and all(serving)


def test_failures_name_the_engine_on_every_rank_and_nobody_hangs(published):
    for rank, found in enumerate(published["dense"]):
        engines, lost, synced, condemned = found["refused"]
        assert engines == ["0.1", "0.2"] and list(lost) == ["0.0"]
        assert "between begin_weight_update() and end_weight_up" in lost["0.0"]
        assert "tensors differ from what was sent: model.norm.weight" in found["wrong"][0]
        assert not any(found[f"{name} hung"] for name in ("nobody", "wrong"))
        if rank == 0:
            assert synced == ["0.1", "0.2"] and condemned == ["0.0"]
            assert found["wrong"][1:] == ([], ["0.0", "0.1", "0.2"])
