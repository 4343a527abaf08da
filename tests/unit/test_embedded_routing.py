"""The embedded engine's `return_routed_experts`: each token's experts are transformers', in SGLang's form."""

import base64

import numpy as np
import pytest
import torch
from embedded_parts import answer_of, scheduler_for, submit
from models import hf_model

from megarl.model.hf_config import HFConfig
from megarl.rollout.embedded import weights as weights_module
from megarl.rollout.embedded.requests import BadRequest, Limits, parse_generate

LAYERS, K = 4, 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(path, model) by seed of two sets of weights."""
    found = []
    for seed in (0, 1):
        folder, model = tmp_path_factory.mktemp(f"moe{seed}"), hf_model("qwen3_moe", seed=seed)
        model.save_pretrained(folder)
        found.append((folder, model))
    return found


def _body(prompt, n=1, **more):
    return {"rid": "r", "input_ids": list(prompt), "return_routed_experts": True,
            "sampling_params": {"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": True, "n": n}, **more}


def _submit(scheduler, body):
    return submit(scheduler, body, routing=True)


def _finish(scheduler, generate):
    while scheduler.step():
        pass
    return answer_of(generate)


def _rows(item):
    """int32 [tokens, layers, k] of an answer's item, as a client of SGLang reads it."""
    flat = np.frombuffer(base64.b64decode(item["meta_info"]["routed_experts"]), np.int32)
    return flat.reshape(-1, LAYERS, K)


def _hf_routing(model, tokens):
    """transformers' experts of each token, [tokens, layers, k], sorted; and the smallest margin of a choice."""
    rows, gates = [], [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda module, inputs, _: rows.append(
        torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].size(-1)), module.weight))) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    top = torch.stack(rows, 1).topk(K + 1, -1)
    return top.indices[:, :, :K].sort(-1).values.numpy(), float((top.values[..., K - 1] - top.values[..., K]).min())


def _check(model, prompt, item, start=0):
    """All rows equal transformers'; the last token has none."""
    tokens = [*prompt, *item["output_ids"]]
    expected, margin = _hf_routing(model, tokens)
    assert margin > 1e-4
    assert _rows(item).shape == (len(tokens) - 1 - start, LAYERS, K)
    np.testing.assert_array_equal(np.sort(_rows(item), -1), expected[start:-1])


@pytest.mark.parametrize("fused", [True, False])
def test_experts_of_samples_that_share_a_prompt(saved, monkeypatch, fused):
    """More samples than slots: some share what was just computed, some what was kept, and slots move."""
    monkeypatch.setattr(weights_module, "FUSED_EXPERTS_MOST", 1 << 20 if fused else 0)
    path, model = saved[0]
    scheduler = scheduler_for(path, slots=20, routing=True)
    prompt = [*range(2, 42)]
    generate = _submit(scheduler, _body(prompt, n=33))
    other = _submit(scheduler, _body([7]))  # a prompt whose prefix is empty
    items = _finish(scheduler, generate)
    for item in items:
        _check(model, prompt, item)
    _check(model, [7], answer_of(other)[0])
    assert sum(item["meta_info"]["cached_tokens"] for item in items) == 32 * 39


def test_rows_move_with_their_sequences(saved):
    """17 short sequences and a long one in the last slot, which moves down when they have ended."""
    path, model = saved[0]
    scheduler = scheduler_for(path, slots=40, routing=True)
    short = [_submit(scheduler, {**_body([number + 2, 5]), "sampling_params": {
        "max_new_tokens": 3, "ignore_eos": True, "sampling_seed": number}}) for number in range(20)]
    long = _submit(scheduler, _body([9, 8, 7]))
    (item,) = _finish(scheduler, long)
    _check(model, [9, 8, 7], item)
    for number, generate in enumerate(short):
        _check(model, [number + 2, 5], answer_of(generate)[0])


def test_start(saved):
    path, model = saved[0]
    scheduler, prompt = scheduler_for(path, routing=True), [3, 4, 5, 6]
    for start in range(5):
        (item,) = _finish(scheduler, _submit(scheduler, _body(prompt, routed_experts_start_len=start)))
        _check(model, prompt, item, start)


def test_recording_changes_no_bit(saved):
    path, _ = saved[0]
    body = {**_body([*range(2, 30)], n=3), "return_routed_experts": False}
    plain, recording = ([(item["output_ids"], item["meta_info"]["output_token_logprobs"]) for item in
                         _finish(scheduler, submit(scheduler, body, routing=True))]
                        for scheduler in (scheduler_for(path), scheduler_for(path, routing=True)))
    assert plain == recording


def _new_weights(scheduler, path):
    scheduler._decoder.weights.load_checkpoint(path)
    scheduler.set_version("v1")


def test_a_retraction_returns_the_new_computation_s_rows(saved):
    """As in SGLang, experts stand with keys and values: computed anew with the new weights, they are the new ones."""
    (path, _), (new_path, new_model) = saved
    scheduler, prompt = scheduler_for(path, routing=True), [3, 4, 5, 6]
    generate = _submit(scheduler, _body(prompt))
    for _ in range(5):
        scheduler.step()
    scheduler.retract()
    _new_weights(scheduler, new_path)
    (item,) = _finish(scheduler, generate)
    assert item["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 5},
                                                    {"version": "v1", "start": 5, "end": 12}]
    _check(new_model, prompt, item)


def test_in_place_keeps_the_old_rows(saved):
    (path, model), (new_path, _) = saved
    scheduler, prompt = scheduler_for(path, routing=True), [3, 4, 5, 6]
    generate = _submit(scheduler, _body(prompt))
    for _ in range(5):
        scheduler.step()
    _new_weights(scheduler, new_path)
    (item,) = _finish(scheduler, generate)
    expected, _ = _hf_routing(model, [*prompt, *item["output_ids"]])
    np.testing.assert_array_equal(np.sort(_rows(item), -1)[:8], expected[:8])  # 4 + 5 tokens, the fifth not computed


def test_aborts(saved):
    """A running sequence keeps its rows; one that waits after a retraction has none left."""
    path, model = saved[0]
    scheduler, prompt = scheduler_for(path, routing=True), [3, 4, 5, 6]
    generate = _submit(scheduler, _body(prompt))
    for _ in range(5):
        scheduler.step()
    scheduler.abort(lambda _: True)
    (item,) = answer_of(generate)
    assert item["meta_info"]["finish_reason"]["type"] == "abort" and len(item["output_ids"]) == 5
    _check(model, prompt, item)
    generate = _submit(scheduler, _body(prompt))
    scheduler.step()
    scheduler.retract()
    scheduler.abort(lambda _: True)
    (item,) = answer_of(generate)
    assert len(item["output_ids"]) == 1 and "routed_experts" not in item["meta_info"]


def test_only_who_asks_gets_them(saved):
    path, model = saved[0]
    scheduler = scheduler_for(path, routing=True)
    (item,) = _finish(scheduler, _submit(scheduler, {**_body([3, 4]), "return_routed_experts": False}))
    assert "routed_experts" not in item["meta_info"]


def test_refusals(saved):
    recording = Limits(99, 2048, routing=True)
    for changes, limits, words in (
            ({}, Limits(99, 2048), "--enable-return-routed-experts"),
            ({"routed_experts_start_len": 3}, recording, r"in \[0, 2\]"),
            ({"routed_experts_start_len": -1}, recording, r"in \[0, 2\]"),
            ({"routed_experts_start_len": True}, recording, r"in \[0, 2\]"),
            ({"return_routed_experts": "yes"}, recording, "true or false")):
        with pytest.raises(BadRequest, match=words):
            parse_generate(_body([3, 4]) | changes, limits, None)


def test_a_dense_model_records_nothing(tmp_path):
    from megarl.errors import UserMistake
    from megarl.rollout.embedded.__main__ import main

    hf_model("qwen3").save_pretrained(tmp_path)
    assert not HFConfig.read(tmp_path).experts
    with pytest.raises(UserMistake, match="no experts"):
        main(["--model-path", str(tmp_path), "--port", "0", "--enable-return-routed-experts"])
