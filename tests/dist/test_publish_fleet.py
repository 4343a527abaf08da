"""Publishing to engines under their supervisor: killed in the middle of an update, and with requests under way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_hf_model
from supervised import Supervised, processes_with, until
from test_publish import DENSE, call, exported, held, scale, trainers
from worlds import run_world

from megarl.config.layout import Layout
from megarl.rollout.client import EngineClient
from megarl.sync.checksum import tensor_checksum

WAYS = {"broadcast": "update_bucket", "disk": "update_from_disk", "delta": "update_from_delta"}
MODES = ("in_place", "retract", "abort", "finish")
LONG = {"input_ids": [5, 9, 3], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True, "sampling_seed": 3}}


def kill_at(method: str, url: str) -> None:
    """Kill the engine at `url` while it works on its second such call, or its first if there is only one to make."""
    real, calls = getattr(EngineClient, method), []
    which = 1 if method == "update_from_disk" else 2

    async def killing(client: EngineClient, *args: Any, **kwargs: Any) -> None:
        if client.url != url:
            return await real(client, *args, **kwargs)
        calls.append(url)
        under_way = asyncio.ensure_future(real(client, *args, **kwargs))
        if len(calls) == which:
            await asyncio.sleep(0)
            for pid in processes_with(f"--port\0{url.rpartition(':')[2]}\0"):
                os.kill(pid, signal.SIGKILL)
        await under_way

    setattr(EngineClient, method, killing)


def replaced(fleet: Any, old: Any) -> bool:
    """Whether both engines are up, one of them in a new life."""
    found = fleet.engines()
    return len(found) == 2 and old.key not in [engine.key for engine in found]


def killed(chunks: list[torch.nn.Module], publisher: Any, fleet: Any, way: str) -> dict[str, Any]:
    """One of two engines dies in the middle of the second publish, comes back, and catches up."""
    first, second = fleet.engines()
    publisher.publish(f"{way}:1")
    scale(chunks, 0.99)
    method = WAYS[way]
    real = getattr(EngineClient, method)
    kill_at(method, second.url)
    begun = time.monotonic()
    report = publisher.publish(f"{way}:2")
    found = {"seconds": time.monotonic() - begun, "engines": [engine.key for engine in report.engines],
             "lost": {engine.key: why for engine, why in report.lost.items()},
             "keys": [first.key, second.key], "synced": [engine.key for engine in fleet.synced_engines()]}
    setattr(EngineClient, method, real)
    until(lambda: replaced(fleet, second), "not started again", 60.0)
    late = publisher.catch_up()
    assert publisher.catch_up() is None
    return found | {"late": [engine.key for engine in late.engines], "bytes": (report.bytes, late.bytes),
                    "synced after": [engine.key for engine in fleet.synced_engines()],
                    "held": held([engine.url for engine in fleet.engines()])}


def paused(publisher: Any, urls: list[str], mode: str) -> tuple[bool, list[dict[str, Any]]]:
    """Publish while each engine answers; (whether caches were kept, the answers' facts)."""
    with ThreadPoolExecutor(2) as threads:
        before = [call(url, "/model_info")["generated_tokens"] for url in urls]
        answers = [threads.submit(call, url, "/generate", LONG) for url in urls]
        until(lambda: all(call(url, "/model_info")["generated_tokens"] > start + 5
                          for url, start in zip(urls, before, strict=True)), "nothing is generated")
        report = publisher.publish(f"{mode}:1", pause=mode)
        return report.caches_kept, [answer.result(60)["meta_info"] for answer in answers]


def trainer(rank: int, model: Path, folder: Path, port: int) -> dict[str, Any]:
    from megarl.checkpoint.hf_export import save_hf
    from megarl.rollout.fleet import Fleet
    from megarl.sync.publish import WeightPublisher

    layout, found = Layout(1), {}
    chunks, hf, config = trainers(layout, model, engines_per_set=1, directory=str(folder / "versions"))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"no_engine_timeout_s": 60.0})})
    fleet = Fleet(torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2, 30.0)
    for way in WAYS:
        sync = config.sync.model_copy(update={"transport": way})
        publisher = WeightPublisher(chunks, hf, config.model_copy(update={"sync": sync}), address="127.0.0.1",
                                    generation=way, fleet=fleet)
        found[way] = killed(chunks, publisher, fleet, way)
        save_hf(chunks, hf, layout, model, folder / way)
        if way == "broadcast":
            urls = [engine.url for engine in fleet.engines()]
            publisher.publish("before:1")
            found["paused"] = {mode: paused(publisher, urls, mode) for mode in MODES}
            found["all die"] = all_die(publisher, fleet)
        publisher.close()
    return found


def all_die(publisher: Any, fleet: Any) -> tuple[list[int], str]:
    """Both engines end in the middle of an update; the publish goes on with what comes back."""
    before, tell = fleet.engines(), publisher._crew.tell

    def kill_before(targets: Any, call: Callable, what: str) -> None:
        if what == "end the update" and targets.engines == tuple(before):
            for engine in before:
                for pid in processes_with(f"--port\0{engine.url.rpartition(':')[2]}\0"):
                    os.kill(pid, signal.SIGKILL)
        tell(targets, call, what)

    publisher._crew.tell = kill_before
    report = publisher.publish("again:1")
    publisher._crew.tell = tell
    until(lambda: len(fleet.engines()) == 2, "not started again", 60.0)
    publisher.catch_up()
    return [engine.incarnation - old.incarnation for engine, old in zip(fleet.engines(), before, strict=True)], str(
        [len(report.engines) > 0, len(report.lost), len(fleet.synced_engines())])


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fleet")
    model, other = (save_hf_model("llama", folder / f"model{seed}", seed, **{**DENSE, "max_position_embeddings": 1024})
                    for seed in (0, 1))
    with Supervised(folder, engines=2, options=None, model=str(other)) as world:
        world.fleet.wait_ready(60)
        return {**run_world(1, trainer, model, folder, world.store.port, timeout=180)[0], "folder": folder}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_killed_in_the_middle_is_replaced_and_whole(published, way: str):
    found, (first, second) = published[way], published[way]["keys"]
    again = (second[0], second[1] + 1)
    assert found["engines"] == [first] == found["synced"] and list(found["lost"]) == [second], found["lost"]
    assert found["late"] == [again] and found["synced after"] == [first, again]
    assert found["seconds"] < 10.0, "waited for a timeout"
    tensors = exported(published["folder"] / way)
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    assert found["held"] == ([expected] * 2, [f"{way}:2"] * 2, [True, True])
    assert found["bytes"][1] >= sum(tensor.nbytes for tensor in tensors.values())  # everything


def test_requests_under_way(published):
    for mode, (kept, answers) in published["paused"].items():
        for meta in answers:
            spans = [(span["version"], span["end"] - span["start"]) for span in meta["weight_versions"]]
            versions = [version for version, _ in spans]
            assert sum(tokens for _, tokens in spans) == meta["completion_tokens"], mode
            if mode in ("in_place", "retract"):
                assert len(versions) == 2 and versions[1] == f"{mode}:1" and meta["completion_tokens"] == 500
                assert meta["num_retractions"] == (mode == "retract")
            else:  # nothing of the new weights
                assert f"{mode}:1" not in versions, mode
                assert meta["finish_reason"]["type"] == {"abort": "abort", "finish": "length"}[mode]
            assert meta["completion_tokens"] == 500 or mode == "abort"
        assert kept == (mode == "in_place")


def test_all_engines_die_and_the_next_ones_get_the_weights(published):
    assert published["all die"] == ([1, 1], str([True, 2, 2]))
