"""The real SGLang on a CPU under the supervisor: against the embedded engine, transformers, and a trainer's weights."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from good_config import _write_tokenizer
from models import config_for, save_hf_model
from rollout_parts import in_loop, make_config, new_store
from supervised import Supervised, listening, processes_with, until
from worlds import run_world

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.config.layout import Layout
from megarl.config.sglang import installation
from megarl.errors import MachineFault
from megarl.rollout import sglang_cpu
from megarl.rollout.client import EngineClient, EngineRefused
from megarl.rollout.external import ExternalEngines
from megarl.rollout.fleet import EngineRecord, Fleet
from megarl.rollout.process import engine_environment
from megarl.rollout.protocol import Completion, GenerateRequest, Sampling

PROMPTS, TOKENS, VOCABULARY = 100, 24, 99
START_S = 240.0
KEYS = Keys("key-to-sample", "key-to-change")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two tiny Qwen3-MoE, fp32, with different random weights and a tokenizer that ends a text as they do."""
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        save_hf_model("qwen3_moe", folder, seed, eos_token_id=2)
        _write_tokenizer(folder)
    return folders


@pytest.fixture(scope="module")
def world(tmp_path_factory, models, interpreter) -> Iterator[Supervised]:
    """A supervisor with one SGLang, on the first model, that takes keys."""
    with Supervised(tmp_path_factory.mktemp("sglang"), options=None, model=str(models[0]), cluster={"device": "cpu"},
                    keys=KEYS, rollout={"engine": "sglang", "sglang_python": interpreter}) as supervised:
        begun = time.monotonic()
        supervised.fleet.wait_ready(START_S)
        print(f"SGLang was up after {time.monotonic() - begun:.0f} s")
        yield supervised


def engine(world: Supervised) -> EngineRecord:
    """The engine as it is now."""
    (record,) = until(world.fleet.engines, "no engine is up", START_S)
    return record


def prompts(count: int) -> list[np.ndarray]:
    """Random ones of 3 to 40 tokens."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCABULARY, rng.integers(3, 40)).astype(np.int32) for _ in range(count)]


def client(record: EngineRecord, session: Any) -> EngineClient:
    return EngineClient(record.url, session, keys=record.keys)


def ask(record: EngineRecord, ids: Sequence[np.ndarray], sampling: Sampling) -> list[list[Completion]]:
    """Completions of every prompt, 16 requests at a time."""
    async def all_of_them(session: Any) -> list[list[Completion]]:
        gate = asyncio.Semaphore(16)

        async def one(number: int) -> list[Completion]:
            async with gate:
                return await client(record, session).generate(GenerateRequest(f"ask/{number}/", ids[number], sampling),
                                             vocab_size=VOCABULARY)

        return await asyncio.gather(*map(one, range(len(ids))))

    return in_loop(all_of_them, 240.0)


def logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary] of transformers."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def gap(folder: Path, record: EngineRecord, temperature: float = 0.7) -> float:
    """Largest difference of an engine's log-probs of sampled tokens from transformers' with a folder's weights."""
    model, worst, ids = load(folder), 0.0, prompts(8)
    for prompt, completions in zip(ids, ask(record, ids, Sampling(TOKENS, temperature, n=4)), strict=True):
        assert len({tuple(completion.response_ids) for completion in completions}) > 1, "n samples are all the same"
        for completion in completions:
            whole = [*prompt.tolist(), *completion.response_ids.tolist()]
            rows = torch.log_softmax(logits(model, whole)[len(prompt) - 1:-1] / temperature, -1)
            expected = rows.gather(1, torch.tensor(completion.response_ids, dtype=torch.int64)[:, None])[:, 0]
            worst = max(worst, float(np.abs(expected.numpy() - completion.logprobs).max()))
    return worst


def test_greedy_tokens_equal_the_embedded_engines(world, models, tmp_path):
    ids, greedy = prompts(PROMPTS), Sampling(TOKENS, temperature=0.0)
    with Supervised(tmp_path, options=None, model=str(models[0]), rollout={"slots": 32}) as other:
        (embedded,) = other.fleet.wait_ready(60)
        expected = ask(embedded, ids, greedy)
    found = ask(engine(world), ids, greedy)
    model, worst, ties, equal = load(models[0]), 0.0, [], 0
    for number, (prompt, (ours,), (theirs,)) in enumerate(zip(ids, expected, found, strict=True)):
        same = min(len(ours.response_ids), len(theirs.response_ids))
        differ = np.flatnonzero(ours.response_ids[:same] != theirs.response_ids[:same])
        if len(differ):
            same = int(differ[0])
            best = logits(model, [*prompt.tolist(), *ours.response_ids[:same].tolist()])[-1].topk(2).values
            ties.append((number, same, float(best[0] - best[1])))
            assert ties[-1][2] < 1e-4, f"prompt {number}, token {same}: no tie"
        else:
            equal += 1
            assert len(ours.response_ids) == len(theirs.response_ids) and ours.finish == theirs.finish
        worst = max(worst, float(np.abs(ours.logprobs[:same] - theirs.logprobs[:same]).max(initial=0.0)))
    ends = [theirs.finish for (theirs,) in found]
    print(f"{equal} of {PROMPTS} equal, {ends.count('stop')} stopped, ties {ties}; log-probs within {worst:.1e}")
    assert worst < 1e-3 and equal + len(ties) == PROMPTS and equal > 0.9 * PROMPTS


def test_log_probs_after_temperature_equal_transformers(world, models):
    worst = gap(models[0], engine(world))
    print(f"sampled log-probs within {worst:.1e} of transformers'")
    assert worst < 1e-4


def test_prefixes_of_old_weights_are_found_under_their_name_alone(world, models):
    """What `rollout.on_update: in_place` relies on: SGLang keeps prefixes, and hands them to requests of one name."""
    record, ids = engine(world), np.arange(10, 40, dtype=np.int32)

    async def talk(session: Any) -> list[Completion]:
        asked, found = client(record, session), []

        async def ask_as(name: str | None) -> None:
            request = GenerateRequest(f"named/{len(found)}/", ids, Sampling(4, 0.0), cached_for=name)
            found.extend(await asked.generate(request, vocab_size=VOCABULARY))

        async def load_in_place(folder: Path) -> None:
            await asked.pause("in_place")
            await asked.update_from_disk(str(folder))
            await asked.continue_()

        await ask_as("a:1")
        await ask_as("a:1")
        await load_in_place(models[1])
        await ask_as("a:1")
        await ask_as("a:2")
        await load_in_place(models[0])
        await asked.flush()
        return found

    first, again, stale, fresh = in_loop(talk, 120.0)
    assert (first.cached_tokens, fresh.cached_tokens) == (0, 0) < (again.cached_tokens, stale.cached_tokens)
    with torch.no_grad():
        logprobs = load(models[1])(torch.from_numpy(ids[None].astype(np.int64))).logits[0, -1].float().log_softmax(-1)
    told = {name: abs(float(one.logprobs[0] - logprobs[int(one.response_ids[0])]))
            for name, one in (("stale", stale), ("fresh", fresh))}
    assert told["fresh"] < 1e-4 < told["stale"], told


def test_keys_open_what_they_should_and_are_seen_by_nobody(world):
    record = engine(world)
    request = GenerateRequest("keys/", prompts(1)[0], Sampling(2))

    def call(keys: Keys, what: str) -> None:
        async def run(session: Any) -> None:
            served = EngineClient(record.url, session, keys=keys)
            await (served.generate(request, vocab_size=VOCABULARY) if what == "generate" else served.flush())

        in_loop(run)

    for keys, what in ((NO_KEYS, "generate"), (Keys(KEYS.admin), "generate"), (Keys(KEYS.api), "flush"),
                       (NO_KEYS, "flush")):
        with pytest.raises(EngineRefused, match="401"):
            call(keys, what)
    call(KEYS, "generate")
    call(KEYS, "flush")
    commands = "".join(name_of(pid) for pid in processes_with(str(world.run_dir)))
    assert "launch.py" in commands and KEYS.api not in commands and KEYS.admin not in commands
    found = listening(processes_with(str(world.run_dir)))
    print(f"SGLang listens on {sorted(found.items())}")
    assert found[int(record.url.rpartition(":")[2])] == "127.0.0.1"
    logs = world.run_dir / "logs"
    assert [path.name for path in logs.iterdir() if ".keys" in path.name] == []
    assert stat.S_IMODE((logs / "engine-0.0.log").stat().st_mode) == 0o600


def test_its_load_is_published(world):
    async def busy(session: Any) -> Any:
        task = asyncio.create_task(client(engine(world), session).generate(
            GenerateRequest("busy/", prompts(1)[0], Sampling(200, n=6)), vocab_size=VOCABULARY))
        seen = []
        while not task.done():
            load = world.fleet.records()[0].load
            seen.append(load.running + load.waiting if load else 0)
            await asyncio.sleep(0.1)
        return max(seen)

    assert 0 < in_loop(busy, 60.0) <= 7
    until(lambda: (load := world.fleet.records()[0].load).running + load.waiting == 0, "it is not idle")


def test_an_engine_by_its_address(world, models, tmp_path):
    """Somebody else's server, as far as this run knows; weights reach it, and it says whose they are."""
    record, store = engine(world), new_store()
    config = make_config(str(models[0]), rollout={"engine": "sglang", "urls": [record.url]},
                         cluster={"rollouts": 0, "device": "cpu"})
    fleet = Fleet.from_config(config, store, KEYS)
    with ExternalEngines(config, store, "u", KEYS):
        (outside,) = fleet.wait_ready(30)
        assert outside.key == ("url.0", 1) and outside.url == record.url
        call = run_world(1, publish, models[0], models[1], store.port, "u", tmp_path / "export", 1, 0, 1, 1)[0]
        assert [report.version for report in call] == ["u:1", "u:2"], call
        assert fleet.synced_engines() == [outside] and gap(tmp_path / "export", outside) < 1e-4

        in_loop(lambda session: client(record, session).begin_update())  # as a trainer leaves it that was killed
        fleet.condemn(outside, "its update was cut short")
        until(lambda: [one for one in fleet.engines() if one.incarnation == 2], "not back in a known state")
        assert fleet.synced_engines() == []
        call = run_world(1, publish, models[0], models[1], store.port, "u", None, 1, 0, 1, 1)[0]
        assert not isinstance(call, str), call
        # its first try is refused: that name of a group is taken since the publishes before
        assert [one.incarnation for one in fleet.synced_engines()] in ([2], [3])


def test_a_request_whose_client_is_gone_is_not_computed_further(world):
    """SGLang renames the samples of a group, so that aborting by rid misses them; the broken connection tells it."""
    async def leave(session: Any) -> float:
        served = client(engine(world), session)
        request = GenerateRequest("gone/", prompts(1)[0], Sampling(200, n=8))
        task = asyncio.create_task(served.generate(request, vocab_size=VOCABULARY))
        await asyncio.sleep(0.3)
        with pytest.raises(EngineRefused, match="pending|not flushed|Flush cache failed|running"):
            await served.flush()
        task.cancel()
        begun = time.monotonic()
        while True:
            try:
                await served.flush()
                return time.monotonic() - begun
            except EngineRefused:
                await asyncio.sleep(0.02)

    print(f"idle {in_loop(leave):.2f} s after the client had gone")


def test_the_config_check_knows_every_flag_by_its_own_name(interpreter):
    """Against SGLang's own parser, in its environment; aliases are left out."""
    code = ("import shim; shim.prepare()\nimport argparse\nfrom sglang.srt.server_args import ServerArgs\n"
            "parser = argparse.ArgumentParser(add_help=False)\nServerArgs.add_cli_args(parser)\n"
            "print(*(name for action in parser._actions for name in action.option_strings))\n"
            "print(*(name for action in parser._actions for name in action.option_strings\n"
            "        if name == '--' + action.dest.replace('_', '-')))")
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=120, check=True,
                          env=engine_environment(interpreter) | {"PYTHONPATH": str(Path(sglang_cpu.__file__).parent)})
    every, plain = (set(line.split()) for line in done.stdout.splitlines()[-2:])
    known = {"--" + name.replace("_", "-") for name in installation(interpreter).arguments}
    assert len(plain) > 500 and known <= every and not plain - known, (known - every, plain - known)


def publish(rank: int, model: Path, weights: Path, port: int, generation: str, export: Path | None = None,
            tp_size: int = 1, rollouts: int = 1, nodes: int = 1, urls: int = 0) -> Any:
    """A trainer publishes `weights`, then nine tenths of them; the two reports, or what went wrong."""
    from megarl.checkpoint.hf_export import save_hf
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.sync.publish import WeightPublisher

    layout = Layout(1)
    make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf, config = HFConfig.read(model), config_for(model)
    config = config.model_copy(update={
        "sync": config.sync.model_copy(update={"bucket_mb": 1, "timeout_s": 60.0}),
        "rollout": config.rollout.model_copy(update={"engine": "sglang"}), "sglang": {"tp_size": tp_size}})
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, weights, hf)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    publisher = WeightPublisher(chunks, hf, config, address="127.0.0.1", generation=generation,
                                fleet=Fleet(store, rollouts, 1, 30.0, nodes=nodes, urls=urls, keys=KEYS))
    try:
        reports = [publisher.publish(f"{generation}:1")]
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(0.9)
        reports.append(publisher.publish(f"{generation}:2"))
    except MachineFault as error:
        return str(error)
    finally:
        publisher.close()
    if export is not None:
        save_hf(chunks, hf, layout, model, export)
    return reports


def test_published_weights_are_whole_and_a_broken_engine_comes_back(world, models, tmp_path):
    call = run_world(1, publish, models[0], models[1], world.store.port, "a", tmp_path / "export")[0]
    assert [report.version for report in call] == ["a:1", "a:2"], call
    print(f"published {call[1].tensors} tensors, {call[1].bytes} bytes in {call[0].seconds:.2f} s, "
          f"again in {call[1].seconds:.2f} s")
    record = engine(world)
    assert [synced.key for synced in world.fleet.synced_engines()] == [record.key]
    worst = gap(tmp_path / "export", record)
    print(f"log-probs within {worst:.1e} of transformers' with the published weights")
    assert worst < 1e-4 < gap(models[1], record)
    (completion,) = ask(record, prompts(1), Sampling(4))[0]
    assert completion.versions == [("a:2", 0, len(completion.response_ids))]

    # as a trainer leaves it that was killed in the middle
    in_loop(lambda session: client(record, session).begin_update())
    reports = run_world(1, publish, models[0], models[1], world.store.port, "b")[0]
    assert not isinstance(reports, str), reports  # it was restarted meanwhile, and took the weights then
    (back,) = world.fleet.synced_engines()
    assert back.key == ("0.0", 2) and [report.engines for report in reports] == [(back,), (back,)]
    assert world.starts() == 2


def test_a_killed_engine_is_started_again_and_leaves_nothing(world):
    before = engine(world)
    pids = [pid for pid in processes_with(str(world.run_dir)) if "sglang::" in name_of(pid)]
    assert len(pids) >= 2, "scheduler and detokenizer were expected"
    main = processes_with(f"--port {before.url.rpartition(':')[2]}".replace(" ", "\0"))
    os.kill(min(main), signal.SIGKILL)
    until(lambda: not world.fleet.engines(), "the dead engine is still registered")
    until(lambda: not any(alive(pid) for pid in pids), "its children outlived it", 10.0)
    until(lambda: [found for found in world.fleet.engines() if found.incarnation == before.incarnation + 1],
          "it was not started again", START_S)


def test_a_killed_supervisor_takes_the_engine_and_its_children_along(world):
    assert len([pid for pid in processes_with(str(world.run_dir)) if "sglang::" in name_of(pid)]) >= 2
    world.processes[0].kill()
    until(lambda: not any(alive(pid) for pid in processes_with(str(world.run_dir))), "something was left", 10.0)


def test_two_tensor_parallel_ranks_take_their_parts_of_the_weights(models, interpreter, tmp_path):
    with Supervised(tmp_path, options=None, model=str(models[0]), cluster={"device": "cpu"}, sglang={"tp_size": 2},
                    rollout={"engine": "sglang", "sglang_python": interpreter}) as world:
        (record,) = world.fleet.wait_ready(START_S)
        assert gap(models[0], record) < 1e-4
        call = run_world(1, publish, models[0], models[1], world.store.port, "t", tmp_path / "export", 2)[0]
        assert [report.version for report in call] == ["t:1", "t:2"], call
        assert gap(tmp_path / "export", record) < 1e-4


def test_one_engine_over_two_nodes(models, interpreter, tmp_path):
    """Two rollout ranks with a "GPU" each have one server of two tensor-parallel ranks, started once on each."""
    with Supervised(tmp_path, rollouts=2, options=None, model=str(models[0]), keys=KEYS, sglang={"tp_size": 2},
                    cluster={"device": "cpu"},
                    rollout={"engine": "sglang", "sglang_python": interpreter, "gpus_per_rank": 1}) as world:
        (record,) = world.fleet.wait_ready(START_S)
        assert record.key == ("0.0", 1) and gap(models[0], record) < 1e-4
        call = run_world(1, publish, models[0], models[1], world.store.port, "n", tmp_path / "export", 2, 2,
                         2)[0]
        assert [report.version for report in call] == ["n:1", "n:2"], call
        assert gap(tmp_path / "export", record) < 1e-4

        second = processes_with("--node-rank\0001")
        os.kill(min(second), signal.SIGKILL)
        until(lambda: not world.fleet.engines(), "the engine without a part is still registered")
        begun = time.monotonic()
        (back,) = until(world.fleet.engines, "it did not come back", START_S)
        print(f"two nodes: up again {time.monotonic() - begun:.0f} s after a part was killed")
        assert back.key == ("0.0", 2) and world.fleet.synced_engines() == [] and gap(models[0], back) < 1e-4
        assert world.starts("0.0") == world.starts("0.0.node1") == 2


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether it still runs; one that only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
