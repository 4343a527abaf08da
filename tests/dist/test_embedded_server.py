"""The embedded engine as a process behind HTTP: protocol, pauses, aborts, weight updates over gloo, and its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from embedded_parts import ROOT, EngineServer, ids_of, logprobs_of
from models import save_hf_model
from safetensors.torch import load_file, save_file

from megarl.sync.checksum import tensor_checksum

# Never finishes in a test: longer than any stall of a busy machine.
LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True, "sampling_seed": 1}}
SHORT = {"input_ids": [9, 8], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 2}}
GROUP = {"input_ids": list(range(2, 40)),
         "sampling_params": {"max_new_tokens": 30, "n": 4, "sampling_seed": [4, 3, 2, 1]}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one model: the first weights, and others."""
    folder = tmp_path_factory.mktemp("models")
    return [save_hf_model("qwen3_moe", folder / str(seed), seed=seed, max_position_embeddings=16384)
            for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(models):
    with EngineServer(models[0], "--slots", "16", "--update-timeout", "5") as server:
        yield server


@pytest.fixture(autouse=True)
def as_new(request):
    """Every test begins with an idle engine that has the first weights."""
    if "server" not in request.fixturenames:
        return
    server, models = request.getfixturevalue("server"), request.getfixturevalue("models")
    server.good("/abort_request", {"abort_all": True})
    server.good("/continue_generation")
    server.good("/update_weights_from_disk", {"model_path": str(models[0]), "weight_version": "a:0"})


@pytest.fixture(scope="module")
def long_ids(server):
    """The first 200 tokens that LONG gets with the first weights, undisturbed."""
    return ids_of(server.generate({**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 200}})[0])


@pytest.fixture
def background():
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def _same(one, other):
    return [(ids_of(a), logprobs_of(a)) for a in one] == [(ids_of(b), logprobs_of(b)) for b in other]


def _generated(server):
    return server.get("/model_info")[1]["generated_tokens"]


def _running(server, background, body=LONG, tokens=5):
    """A request that is under way, as a future; it has some tokens."""
    before = _generated(server)
    future = background(server.generate, body)
    server.until(lambda info: info["generated_tokens"] >= before + tokens)
    return future


def _go_on_and_abort(server, future, tokens=20):
    """The item of a running request that gets some more tokens and is then aborted."""
    before = _generated(server)
    server.good("/continue_generation")
    server.until(lambda info: info["generated_tokens"] >= before + tokens)
    server.good("/abort_request", {"abort_all": True})
    return future.result(60)[0]


def test_answer_in_sglang_s_form(server):
    (item,) = server.generate({**SHORT, "rid": "me"})
    meta = item["meta_info"]
    assert meta.pop("output_token_logprobs") and len(item["output_ids"]) == 8 and item["text"] == ""
    assert meta == {
        "id": "me", "finish_reason": {"type": "length", "length": 8}, "prompt_tokens": 2, "completion_tokens": 8,
        "cached_tokens": 0, "weight_version": "a:0", "weight_versions": [{"version": "a:0", "start": 0, "end": 8}],
        "num_retractions": 0, "input_token_logprobs": []}
    assert isinstance(server.good("/generate", SHORT), dict)
    assert "output_token_logprobs" not in server.good("/generate", SHORT)["meta_info"]
    both = server.good("/generate", {**SHORT, "input_ids": [[9, 8], [3]]})
    assert [item["meta_info"]["prompt_tokens"] for item in both] == [2, 1]
    assert server.good("/generate", GROUP) and len(server.good("/generate", GROUP)) == 4


def test_refusals_by_status_400(server):
    for path, body, message in [
            ("/generate", {"input_ids": [99]}, "outside the vocabulary of 99"), ("/generate", b"{", "is not JSON"),
            ("/generate", [1], "JSON object"), ("/pause_generation", {"mode": "soft"}, "abort, retract, in_place"),
            ("/abort_request", {}, "rid"), ("/weights_checker", {"action": "snapshot"}, "not supported"),
            ("/init_weights_update_group", {"master_address": "127.0.0.1"}, "master_port"),
            ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]}, "shapes")]:
        status, answer = server.post(path, body)
        assert status == 400 and message in answer["error"]["message"], (path, answer)
    assert server.get("/nowhere") == (404, {"error": {"message": "Not Found"}})
    assert server.generate(SHORT)


def test_the_crowd_does_not_matter(server, background):
    alone = server.generate(GROUP)
    others = [background(server.generate, {"input_ids": [seed + 2] * (3 * seed + 1), "sampling_params": {
        "max_new_tokens": 20 + seed, "n": 3, "temperature": 0.8}}) for seed in range(6)]
    crowded = server.generate(GROUP)
    for other in others:
        other.result()
    assert _same(alone, crowded)


def test_abort_by_the_beginning_of_an_id(server, background):
    futures = [_running(server, background, {**LONG, "rid": rid}) for rid in ("x1", "x2", "y1")]
    before = _generated(server)
    server.until(lambda info: info["generated_tokens"] >= before + 15)  # one each in every step
    server.good("/abort_request", {"rid": "x"})
    for future in futures[:2]:
        (item,) = future.result(60)
        assert item["meta_info"]["finish_reason"]["type"] == "abort" and len(ids_of(item)) >= 5
    assert not futures[2].done()
    server.good("/abort_request", {"abort_all": True})
    assert futures[2].result(60)[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_hangs_up_stops_its_request(server):
    code = ("import json, sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1], json.dumps("
            f"{LONG!r}).encode(), method='POST'))")
    before = _generated(server)
    client = subprocess.Popen([sys.executable, "-c", code, f"http://127.0.0.1:{server.port}/generate"])
    server.until(lambda info: info["generated_tokens"] > before)
    client.kill()
    client.wait()
    server.until(lambda info: info["running"] == 0)
    assert _generated(server) < before + 15000


def test_pause_in_place_freezes_and_refuses_a_flush(server, background, long_ids):
    future = _running(server, background)
    server.good("/pause_generation", {"mode": "in_place"})
    frozen = _generated(server)
    waiting = background(server.generate, SHORT)
    server.until(lambda info: info["waiting"] == 1)
    assert server.post("/flush_cache")[0] == 400
    time.sleep(0.1)
    assert _generated(server) == frozen and not future.done() and not waiting.done()
    ids = ids_of(_go_on_and_abort(server, future))
    assert len(waiting.result(60)[0]["output_ids"]) == 8
    assert len(ids) > 10 and ids[:200] == long_ids[:len(ids)]


def test_pause_retract_frees_the_slots(server, background, long_ids):
    future = _running(server, background)
    server.good("/pause_generation", {"mode": "retract"})
    info = server.get("/model_info")[1]
    assert (info["running"], info["waiting"], info["paused"]) == (0, 1, True)
    server.good("/flush_cache")
    item = _go_on_and_abort(server, future)
    ids = ids_of(item)
    assert len(ids) >= 25 and ids[:200] == long_ids[:len(ids)] and item["meta_info"]["num_retractions"] == 1


def test_pause_abort_ends_requests_and_holds_new_ones(server, background):
    future = _running(server, background)
    server.good("/pause_generation")
    assert future.result(60)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    later = background(server.generate, SHORT)
    server.until(lambda info: info["waiting"] == 1)
    server.good("/flush_cache")
    server.good("/continue_generation")
    assert len(later.result(60)[0]["output_ids"]) == 8


def test_version_abort_is_the_default(server, background):
    future = _running(server, background)
    server.good("/update_weight_version", {"new_version": "b:1"})
    assert future.result(60)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.get("/model_info")[1]["weight_version"] == "b:1"


class Trainer:
    """This process as rank 0 of an update group."""

    count = 0

    def __init__(self, server, background):
        Trainer.count += 1
        self.name, self.server, self.background = f"test-{os.getpid()}-{Trainer.count}", server, background
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        body = {"master_address": "127.0.0.1", "master_port": self.store.port, "rank_offset": 1, "world_size": 2,
                "group_name": self.name, "backend": "gloo"}
        joining = background(server.good, "/init_weights_update_group", body)
        self.group, _ = dist.distributed_c10d._new_process_group_helper(
            2, 0, [], dist.Backend("gloo"), dist.PrefixStore(self.name, self.store), group_name=self.name,
            timeout=timedelta(seconds=30))
        dist.distributed_c10d._world.pg_group_ranks[self.group] = {0: 0, 1: 1}
        joining.result(60)
        assert server.post("/init_weights_update_group", body)[0] == 400  # the name is taken

    def send(self, tensors, flat=False, **body):
        """One bucket; the engine's (status, answer)."""
        names = list(tensors)
        answer = self.background(self.server.post, "/update_weights_from_distributed", {
            "names": names, "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
            "shapes": [list(tensors[name].shape) for name in names], "group_name": self.name,
            "load_format": "flattened_bucket" if flat else None, **body})
        pieces = list(tensors.values())
        for tensor in [torch.cat([p.reshape(-1).view(torch.uint8) for p in pieces])] if flat else pieces:
            dist.broadcast(tensor.contiguous(), src=0, group=self.group)
        return answer.result(60)

    def close(self):
        dist.destroy_process_group(self.group)
        self.server.good("/destroy_weights_update_group", {"group_name": self.name})


@pytest.fixture
def trainer(server, background):
    trainer = Trainer(server, background)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def fresh(models):
    """What an engine answers that was started with the other weights."""
    with EngineServer(models[1], "--slots", "16") as server:
        return server.generate(GROUP)


@pytest.fixture(scope="module")
def tensors(models):
    return load_file(models[1] / "model.safetensors")


def test_update_over_gloo_equals_a_fresh_engine(server, trainer, models, tensors, fresh):
    before = server.generate(GROUP)
    names = sorted(tensors)
    server.good("/pause_generation", {"mode": "retract"})
    server.good("/flush_cache")
    server.good("/begin_weight_update")
    assert server.post("/begin_weight_update")[0] == 400
    assert trainer.send({name: tensors[name] for name in names[::2]})[0] == 200
    assert trainer.send({name: tensors[name] for name in names[1::2]}, flat=True)[0] == 200
    server.good("/end_weight_update")
    server.good("/update_weight_version", {"new_version": "g:7", "abort_all_requests": False})
    server.good("/continue_generation")
    after = server.generate(GROUP)
    assert _same(after, fresh) and not _same(after, before)
    assert {item["meta_info"]["weight_version"] for item in after} == {"g:7"}
    checksums = server.good("/weights_checker", {"action": "checksum"})["checksums"]
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_update_from_disk(server, models, fresh):
    answer = server.good("/update_weights_from_disk", {"model_path": str(models[1]), "weight_version": "g:8"})
    assert answer["success"] is True and _same(server.generate(GROUP), fresh)
    assert server.post("/update_weights_from_disk", {"model_path": "/nowhere"})[0] == 400
    assert _same(server.generate(GROUP), fresh)  # nothing had been overwritten


def test_an_update_in_place_shows_in_the_spans(server, trainer, background, tensors, fresh):
    future = _running(server, background)
    server.good("/pause_generation", {"mode": "in_place"})
    server.good("/begin_weight_update")
    status, answer = trainer.send(dict(list(tensors.items())[:3]))
    assert status == 400 and "not flushed" in answer["message"]  # as in SGLang: changed, but running requests
    assert trainer.send(dict(list(tensors.items())[3:]), flush_cache=False, weight_version="g:9")[0] == 200
    server.good("/end_weight_update")
    item = _go_on_and_abort(server, future)
    first, second = item["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("a:0", 0, "g:9")
    assert 5 <= first["end"] == second["start"] and second["start"] + 20 <= second["end"] == len(ids_of(item))
    assert _same(server.generate(GROUP), fresh)


def test_half_an_update_serves_nothing_until_a_whole_one(server, trainer, background, tensors, fresh):
    items = list(tensors.items())
    assert trainer.server.post("/end_weight_update")[0] == 400  # none is open
    server.good("/begin_weight_update")
    waiting = background(server.generate, GROUP)
    assert trainer.send(dict(items[:4]))[0] == 200
    status, answer = server.post("/end_weight_update")
    assert status == 400 and f"{len(items) - 4} of {len(items)} tensors were not sent" in answer["message"]
    assert not server.get("/model_info")[1]["weights_whole"] and server.get("/health")[0] == 200
    time.sleep(0.1)
    assert not waiting.done()
    server.good("/begin_weight_update")
    assert trainer.send(dict(items), flat=True)[0] == 200
    server.good("/end_weight_update")
    assert _same(waiting.result(60), fresh)


def test_tensors_that_do_not_fit_are_received_and_refused(server, trainer, tensors):
    before = server.good("/weights_checker")["checksums"]
    server.good("/begin_weight_update")
    name = "model.norm.weight"
    for bad, message in [({"model.nothing": torch.ones(3)}, "no tensor model.nothing"),
                         ({name: torch.ones(3), "lm_head.weight": torch.ones(99, 32)}, "has shape [3], expected [32]")]:
        status, answer = trainer.send(bad)
        assert status == 400 and answer["success"] is False and message in answer["message"]
    assert server.good("/weights_checker")["checksums"] == before
    server.good("/end_weight_update")  # nothing was changed: serves on
    assert server.generate(SHORT)
    status, answer = server.post("/update_weights_from_distributed", {
        "names": [], "dtypes": [], "shapes": [], "group_name": trainer.name})
    assert status == 400 and "between begin_weight_update() and end_weight_update()" in answer["message"]


def test_a_trainer_that_never_comes_is_a_refusal_in_time(server):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    status, answer = server.post("/init_weights_update_group", {
        "master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2,
        "group_name": f"alone-{os.getpid()}", "backend": "gloo"})
    assert status == 400 and "Failed to initialize" in answer["message"]
    assert server.generate(SHORT)


def _start(*arguments):
    return subprocess.run([sys.executable, "-m", "megarl.rollout.embedded", *map(str, arguments)], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)


def test_mistakes_are_told_once_with_status_64(server, models, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mamba"}')
    sharded = save_hf_model("llama", tmp_path / "sharded", max_shard_size="20KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    save_file({}, shard)
    shard.unlink()
    for arguments, message in [
            (("--model-path", tmp_path / "none", "--port", 0), "there is no such file"),
            (("--model-path", other, "--port", 0), "model family 'mamba' is not known"),
            (("--model-path", sharded, "--port", 0), f"the weights file {shard.name} is missing"),
            (("--model-path", models[0], "--port", server.port), f"cannot listen on port {server.port}"),
            (("--model-path", models[0]), "--port")]:
        done = _start(*arguments)
        assert done.returncode == 64 and message in done.stderr, done.stderr
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 2


def test_it_ends_with_its_parent(models):
    code = ("import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-m', 'megarl.rollout.embedded', "
            "'--model-path', sys.argv[1], '--port', '0', '--parent-pid', str(os.getpid())]); time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", code, str(models[0])], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
    assert "serving" in parent.stdout.readline()
    parent.kill()
    parent.wait()
    # the engine holds the other end of the pipe: the end of its output is its own end
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(parent.stdout), daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and lines == ["the parent process is gone\n"]
    parent.stdout.close()


def test_sigterm_ends_it_also_while_it_decodes(models, background):
    with EngineServer(models[0]) as server:
        background(server.post, "/generate", LONG)
        server.until(lambda info: info["generated_tokens"] > 0)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
