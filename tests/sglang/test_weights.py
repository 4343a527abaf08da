"""Weights to the real SGLang by each transport: against one that was started from an export of them, with requests
under way, and with an engine that dies in the middle."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from good_config import _write_tokenizer
from models import config_for, save_hf_model
from supervised import Supervised, processes_with, until
from worlds import run_world

from megarl.config.layout import Layout

START_S = 300.0
WAYS = ("broadcast", "disk", "delta")
MODES = ("in_place", "retract", "abort", "finish")
PROMPTS = ([5, 9, 3, 17, 2], [44, 8], list(range(3, 60)))
LONG_TOKENS = 500  # 3 to 20 ms each: more than is there when a publish that has begun comes to its pause
LONG = {"input_ids": [5, 9, 3], "sampling_params": {"max_new_tokens": LONG_TOKENS, "ignore_eos": True},
        "return_logprob": True}


def call(url: str, path: str, body: dict | None = None) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode() if body is not None else None,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def sums(url: str) -> list[dict[str, str]]:
    """SGLang's own checksums of every tensor that it has, of each of its ranks."""
    return [rank["checksums"] for rank in call(url, "/weights_checker", {"action": "checksum"})["ranks"]]


def greedy(url: str) -> list[list[tuple[float, int]]]:
    """Log-probs and tokens after fixed prompts, one request at a time."""
    return [[tuple(row[:2]) for row in call(url, "/generate", {"input_ids": prompt, "return_logprob": True,
             "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}})
             ["meta_info"]["output_token_logprobs"]] for prompt in PROMPTS]


def change(chunks: list[torch.nn.Module], factor: float) -> None:
    """One element in seven."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.view(-1)[::7] *= factor


def paused(publisher: Any, urls: list[str], mode: str) -> tuple[bool, list[dict[str, Any]]]:
    """Publish while each engine answers."""
    with ThreadPoolExecutor(len(urls)) as threads:
        answers = [threads.submit(call, url, "/generate", LONG) for url in urls]
        time.sleep(0.5)  # some tokens
        report = publisher.publish(f"{mode}:1", pause=mode)
        return report.caches_kept, [answer.result(120)["meta_info"] for answer in answers]


def replaced(fleet: Any, old: Any) -> bool:
    """Whether both engines are up, one of them in a new life."""
    found = fleet.engines()
    return len(found) == 2 and old.key not in [engine.key for engine in found]


def server_of(url: str) -> int:
    """The id of the engine's process: not its relay's, which has the engine's command among its arguments."""
    found = set(processes_with(f"--port\0{url.rpartition(':')[2]}\0--dtype"))
    return min(found - set(processes_with("megarl.rollout.relay")))


def killed(publisher: Any, fleet: Any, way: str) -> dict[str, Any]:
    """One of two engines ends after the other has begun to take the weights; it comes back and catches up."""
    first, second = fleet.engines()
    tell = publisher._crew.tell

    def kill_before(targets: Any, act: Any, what: str) -> None:
        if what.startswith({"broadcast": "end the update", "disk": "load", "delta": "load"}[way]):
            os.kill(server_of(second.url), signal.SIGKILL)
        tell(targets, act, what)

    publisher._crew.tell = kill_before
    begun = time.monotonic()
    report = publisher.publish(f"{way}:3")
    seconds, publisher._crew.tell = time.monotonic() - begun, tell
    until(lambda: replaced(fleet, second), "not started again", START_S)
    late = publisher.catch_up()
    return {"engines": [engine.key for engine in report.engines], "seconds": seconds, "late": late.version,
            "lost": [engine.key for engine in report.lost], "keys": (first.key, second.key),
            "synced": [engine.key for engine in fleet.synced_engines()],
            "sums": [sums(engine.url) for engine in fleet.engines()]}


def trainer(rank: int, model: Path, folder: Path, port: int) -> dict[str, Any]:
    from megarl.checkpoint.hf_export import save_hf
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.rollout.fleet import Fleet
    from megarl.sync.publish import WeightPublisher

    layout, found = Layout(1), {}
    make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf, config = HFConfig.read(model), config_for(model)
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, model, hf)
    fleet = Fleet(torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2, 60.0)
    for way in WAYS:
        sync = config.sync.model_copy(update={"transport": way, "bucket_mb": 1, "timeout_s": 60.0, "verify": True,
                                              "engines_per_set": 1, "directory": str(folder / "versions")})
        publisher = WeightPublisher(chunks, hf, config.model_copy(update={
            "sync": sync, "rollout": config.rollout.model_copy(update={"engine": "sglang"})}), address="127.0.0.1",
            generation=way, fleet=fleet)
        reports = []
        for number, factor in ((1, 2.0), (2, 0.5)):  # there and, exactly, back again
            change(chunks, factor)
            reports.append(publisher.publish(f"{way}:{number}"))
        urls = [engine.url for engine in fleet.engines()]
        found[way] = {"sums": [sums(url) for url in urls], "greedy": [greedy(url) for url in urls],
                      "versions": [call(url, "/model_info")["weight_version"] for url in urls],
                      "engines": [len(report.engines) for report in reports],
                      "bytes": [report.bytes for report in reports],
                      "seconds": [(report.seconds, report.paused_s) for report in reports]}
        found[way]["paused"] = {mode: paused(publisher, urls, mode) for mode in MODES}
        found[way]["killed"] = killed(publisher, fleet, way)
        publisher.close()
    save_hf(chunks, hf, layout, model, folder / "export")
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory, interpreter) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    model, other = (save_hf_model("qwen3_moe", folder / f"model{seed}", seed, eos_token_id=2,
                                  max_position_embeddings=1024) for seed in (0, 1))
    for path in (model, other):
        _write_tokenizer(path)
    sglang = {"engine": "sglang", "sglang_python": interpreter}
    for name in ("run", "fresh"):
        (folder / name).mkdir()
    with Supervised(folder / "run", engines=2, options=None, model=str(other), cluster={"device": "cpu"},
                    rollout=sglang, sync={"transport": "delta"}) as world:  # so that each engine has a relay
        world.fleet.wait_ready(START_S)
        found = run_world(1, trainer, model, folder, world.store.port, timeout=900)[0]
    _write_tokenizer(folder / "export")
    with Supervised(folder / "fresh", options=None, model=str(folder / "export"), cluster={"device": "cpu"},
                    rollout=sglang) as world:
        (fresh,) = world.fleet.wait_ready(START_S)
        found["fresh"] = sums(fresh.url), greedy(fresh.url)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_engines_equal_one_that_was_started_from_the_export(published, way: str):
    found = published[way]
    fresh_sums, fresh_greedy = published["fresh"]
    print(f"{way}: {len(fresh_sums[0])} tensors, (seconds, paused) {found['seconds']}, bytes {found['bytes']}")
    assert len(fresh_sums[0]) > 30 and found["sums"] == [fresh_sums] * 2
    assert found["greedy"] == [fresh_greedy] * 2
    assert found["versions"] == [f"{way}:2"] * 2 and found["engines"] == [2, 2]


@pytest.mark.parametrize("way", WAYS)
def test_requests_under_way(published, way: str):
    for mode, (kept, answers) in published[way]["paused"].items():
        for meta in answers:
            spans = meta["weight_versions"]
            versions = [span["version"] for span in spans]
            print(way, mode, meta["finish_reason"], meta.get("num_retractions"), spans)
            if mode in ("in_place", "retract"):
                assert versions[-1] == f"{mode}:1" and len(versions) == 2
                assert meta["completion_tokens"] == LONG_TOKENS
                assert meta["num_retractions"] == (mode == "retract")
            else:
                assert f"{mode}:1" not in versions
                assert meta["finish_reason"]["type"] == {"abort": "abort", "finish": "length"}[mode]
        assert kept == (mode == "in_place")


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_dies_in_the_middle_is_replaced_and_whole(published, way: str):
    found = published[way]["killed"]
    first, (name, incarnation) = found["keys"]
    print(f"{way}: {found['seconds']:.1f} s")
    assert found["engines"] == [first] and found["lost"] == [(name, incarnation)] and found["late"] == f"{way}:3"
    assert found["synced"] == [first, (name, incarnation + 1)]
    assert found["sums"][0] == found["sums"][1] == published["fresh"][0]
