"""The embedded decoder against transformers: the same greedy tokens and log-probs, for every family and path."""

import numpy as np
import pytest
import torch
from embedded_parts import answer_of, ids_of, logprobs_of, run, scheduler_for, submit
from models import FAMILIES, hf_model

from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.rollout.embedded import weights as weights_module
from megarl.rollout.embedded.weights import Weights

LENGTHS = (1, 2, 16, 17, 40, 70)
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def _save(folder, name, **changes):
    model = hf_model(name, **changes)
    model.save_pretrained(folder)
    return model


def _prompts(lengths, seed=0):
    source = np.random.default_rng(seed)
    return [source.integers(0, 99, length).tolist() for length in lengths]


def _hf_logprobs(model, prompt, output, temperature=1.0):
    """[output, vocab]: transformers' log-probs at each output position, teacher-forced."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1:-1].float()
    return (logits / temperature).log_softmax(-1)


def _compare(model, prompts, items, atol=1e-5):
    for prompt, item in zip(prompts, items, strict=True):
        expected = _hf_logprobs(model, prompt, ids_of(item))
        assert expected.argmax(-1).tolist() == item["output_ids"]
        np.testing.assert_allclose(logprobs_of(item), expected.max(-1).values, atol=atol, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(tmp_path, name):
    model = _save(tmp_path, name)
    prompts = _prompts(LENGTHS)
    _compare(model, prompts, run(scheduler_for(tmp_path), {"input_ids": prompts, "sampling_params": GREEDY}))


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False}], ids=["normalised", "plain"])
@pytest.mark.parametrize("fused", [True, False])
def test_both_forms_of_the_experts(tmp_path, monkeypatch, fused, changes):
    monkeypatch.setattr(weights_module, "FUSED_EXPERTS_MOST", 1 << 20 if fused else 0)
    model = _save(tmp_path, "qwen3_moe", **changes)
    scheduler = scheduler_for(tmp_path)
    assert scheduler._decoder.weights.fused_experts == fused
    prompts = _prompts(LENGTHS)
    _compare(model, prompts, run(scheduler, {"input_ids": prompts, "sampling_params": GREEDY}))


def test_more_keys_than_one_sum_takes(tmp_path):
    model = _save(tmp_path, "llama_tied", max_position_embeddings=1200)
    prompts = _prompts((505, 1030))
    _compare(model, prompts, run(scheduler_for(tmp_path), {"input_ids": prompts, "sampling_params": GREEDY}))


def test_bfloat16_is_near_transformers(tmp_path):
    """Both round to 8 bits of mantissa in many places; a wrong path would be off by whole units."""
    model = _save(tmp_path, "qwen3_moe").to(torch.bfloat16)
    items = run(scheduler_for(tmp_path, dtype="bfloat16"),
                {"input_ids": _prompts((5, 33)), "sampling_params": {**GREEDY, "temperature": 1.0}})
    for prompt, item in zip(_prompts((5, 33)), items, strict=True):
        expected = _hf_logprobs(model, prompt, item["output_ids"])
        expected = expected.gather(1, torch.tensor(item["output_ids"]).unsqueeze(1)).squeeze(1)
        assert np.abs(np.array(logprobs_of(item)) - expected.numpy()).mean() < 0.03


def test_samples_follow_transformers_probabilities(tmp_path):
    """Chi-square of 4000 first tokens against the softmax at temperature 0.3; and their log-probs."""
    model = _save(tmp_path, "qwen3")
    (prompt,) = _prompts((9,))
    items = run(scheduler_for(tmp_path), {"input_ids": prompt, "sampling_params": {
        "temperature": 0.3, "max_new_tokens": 1, "n": 4000, "sampling_seed": list(range(4000))}})
    expected = _hf_logprobs(model, prompt, [0], temperature=0.3)[0]
    drawn = np.array([item["output_ids"][0] for item in items])
    np.testing.assert_allclose([logprobs_of(item)[0] for item in items], expected[drawn], atol=1e-5)
    counts, wanted = np.bincount(drawn, minlength=99), expected.exp().double().numpy() * len(drawn)
    often = wanted >= 5
    pooled = np.append(counts[often], counts[~often].sum()), np.append(wanted[often], wanted[~often].sum())
    chi_square = ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum()
    freedom = len(pooled[0]) - 1
    assert freedom > 20 and chi_square < freedom + 3.1 * (2 * freedom) ** 0.5  # about 1 in 1000 beyond


def test_a_new_sequence_never_sees_its_slot_s_former_one(tmp_path):
    _save(tmp_path, "qwen3")
    used, fresh = scheduler_for(tmp_path, slots=1), scheduler_for(tmp_path, slots=1)
    first, second = ({"rid": "x", "input_ids": prompt, "sampling_params": {"max_new_tokens": 24, "sampling_seed": 5}}
                     for prompt in _prompts((60, 3)))
    run(used, first)
    assert run(used, second) == run(fresh, second)


def test_names_and_shapes_must_fit(tmp_path):
    from safetensors.torch import load_file, save_file

    _save(tmp_path, "qwen2")
    hf = HFConfig.read(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.2.self_attn.k_proj.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserMistake, match="1 tensors are missing, among them model.layers.2.self_attn.k_proj.bias"):
        Weights(hf, torch.float32).load_checkpoint(tmp_path)
    save_file({**tensors, "model.layers.2.self_attn.k_proj.bias": lost[:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(UserMistake, match=r"k_proj.bias has shape \[15\], expected \[16\]"):
        Weights(hf, torch.float32).load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserMistake, match="not a safetensors file"):
        Weights(hf, torch.float32).load_checkpoint(tmp_path)


def test_logits_that_are_not_finite_end_only_their_own_sequence(tmp_path):
    _save(tmp_path, "qwen3", tie_word_embeddings=False)
    scheduler = scheduler_for(tmp_path)
    weights = scheduler._decoder.weights
    kept = weights.views["model.embed_tokens.weight"][7].clone()
    weights.views["model.embed_tokens.weight"][7] = float("nan")
    body = {"sampling_params": {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}}
    prompts = [[3, 7, 4], [3, 4]]
    sick = submit(scheduler, {"input_ids": prompts[0], **body})
    (well,) = run(scheduler, {"input_ids": prompts[1], **body})
    (broken,) = answer_of(sick)
    assert broken["meta_info"]["finish_reason"]["type"] == "abort" and broken["output_ids"] == []
    assert "not finite" in broken["meta_info"]["finish_reason"]["message"]
    assert np.isfinite(logprobs_of(well)).all() and len(well["output_ids"]) == 4
    weights.views["model.embed_tokens.weight"][7] = kept
    (healed,) = run(scheduler, {"input_ids": [3], **body})  # in the slot that held NaN keys, after its own end
    assert np.isfinite(logprobs_of(healed)).all() and len(healed["output_ids"]) == 4
