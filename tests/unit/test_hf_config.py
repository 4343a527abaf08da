"""Hugging Face configs: what is read, what is refused."""

import json
from pathlib import Path

import models
import pytest

from megarl.errors import UserMistake
from megarl.model.families.tables import is_beside
from megarl.model.hf_config import HFConfig, Latent, RopeScaling, Yarn

QWEN3_30B = {  # from the published config.json of Qwen3-30B-A3B
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936}
DEEPSEEK_V3 = {  # from the published config.json of DeepSeek-V3, without its fp8 quantisation
    "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280}
MIXTRAL = {  # from the published config.json of Mixtral-8x7B-v0.1
    "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32000}


def test_reads_a_published_config() -> None:
    hf = HFConfig.of(QWEN3_30B, {"eos_token_id": [151645, 151643], "pad_token_id": 151643})
    assert (hf.family, hf.hidden, hf.layers, hf.heads, hf.kv_heads, hf.head_dim) == ("qwen3_moe", 2048, 48, 32, 4, 128)
    assert (hf.experts, hf.top_k, hf.moe_ffn, hf.norm_topk, hf.qk_norm) == (128, 8, 768, True, True)
    assert (hf.rope_theta, hf.rope_scaling, hf.dtype, hf.tied) == (1e6, None, "bfloat16", False)
    assert hf.eos_ids == (151645, 151643)


def test_reads_what_transformers_writes(tmp_path: Path) -> None:
    """Defaults that transformers leaves out of the file, and both forms of rope."""
    for name in models.FAMILIES:
        config = models.hf_config(name)
        config.save_pretrained(tmp_path / name)
        hf = HFConfig.read(tmp_path / name)
        assert (hf.vocab, hf.hidden, hf.layers, hf.heads) == (99, 32, 4, 4)
        assert hf.kv_heads == config.num_key_value_heads and hf.tied == config.tie_word_embeddings
        size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
        assert hf.head_dim == (size or config.hidden_size // config.num_attention_heads)
        assert hf.rope_theta == config.rope_parameters["rope_theta"] and hf.norm_eps == config.rms_norm_eps
    assert HFConfig.read(tmp_path / "llama_tied").rope_scaling == RopeScaling(4.0, 1.0, 4.0, 32)
    old = {**QWEN3_30B, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}
    assert HFConfig.of(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_reads_the_published_config_of_deepseek_v3() -> None:
    hf = HFConfig.of(DEEPSEEK_V3)
    assert hf.latent == Latent(1536, 512, 128, 64, 128) and hf.rope_scaling == Yarn(40.0, 32.0, 1.0, 4096, 1.0)
    assert (hf.head_dim, hf.kv_heads, hf.rotary_dim, hf.rope_theta) == (192, 128, 64, 10000.0)
    assert (hf.experts, hf.top_k, hf.router_groups, hf.groups_taken, hf.route_scale) == (256, 8, 8, 4, 2.5)
    assert (hf.moe_ffn, hf.shared_ffn, hf.ffn, hf.router_bias) == (2048, 2048, 18432, True)
    assert hf.moe_layers == tuple(range(3, 61))


def test_reads_the_published_config_of_mixtral() -> None:
    hf = HFConfig.of(MIXTRAL)
    assert (hf.experts, hf.top_k, hf.moe_ffn, hf.norm_topk, hf.kv_heads, hf.head_dim) == (8, 2, 14336, True, 8, 128)
    assert (hf.rope_theta, hf.norm_eps, hf.qk_norm, hf.shared_ffn, hf.dense_layers) == (1e6, 1e-5, False, 0, 0)


@pytest.mark.parametrize("base, change, named", [
    ("deepseek", {"rope_interleave": False}, "rope_interleave"), ("deepseek", {"topk_group": 2}, "topk_group"),
    ("deepseek", {"attention_bias": True}, "attention_bias"), ("deepseek", {"norm_topk_prob": False}, "norm_topk"),
    ("deepseek", {"n_group": 7}, "n_group"), ("deepseek", {"first_k_dense_replace": 61}, "first_k_dense"),
    ("deepseek", {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale_all_dim": 0.5}}, "equal mscale"),
    ("deepseek", {"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}}, "factor is missing"),
    ("deepseek", {"quantization_config": {"quant_method": "fp8"}}, "unquantised"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window"), ("mixtral", {"num_experts_per_tok": 9}, "9 of 8 experts")])
def test_refuses_variants_of_these(base: str, change: dict, named: str) -> None:
    with pytest.raises(UserMistake, match=named):
        HFConfig.of({**(DEEPSEEK_V3 if base == "deepseek" else MIXTRAL), **change})


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserMistake) as error:
        HFConfig.of({"model_type": "mamba"})
    assert str(error.value) == ("config.json: model_type: model family 'mamba' is not known\n  remedy: known families: "
                                "deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen3, qwen3_moe")


@pytest.mark.parametrize("change, named", [
    ({"model_type": "mamba"}, "model_type"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"), ({"attention_bias": True}, "attention_bias"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"), ({"hidden_size": "big"}, "hidden_size"),
    ({"num_experts_per_tok": 1}, "norm_topk_prob"), ({"num_experts_per_tok": 200}, "num_experts_per_tok"),
    ({"quantization_config": {"bits": 4}}, "quantization_config")])
def test_refuses_what_it_would_train_wrongly(change: dict, named: str) -> None:
    with pytest.raises(UserMistake, match=named):
        HFConfig.of({**QWEN3_30B, **change})


GLM_45_AIR = {  # from the published config.json of GLM-4.5-Air
    "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336],
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": False,
    "vocab_size": 151552}


def test_reads_a_model_with_a_shared_expert_and_dense_layers() -> None:
    hf = HFConfig.of(GLM_45_AIR)
    assert (hf.experts, hf.top_k, hf.moe_ffn, hf.shared_ffn, hf.route_scale) == (128, 8, 1408, 1408, 1.0)
    assert hf.router_bias and hf.norm_topk and hf.qkv_bias and not hf.qk_norm and not hf.tied
    assert (hf.dense_layers, hf.moe_layers, hf.beside_ffns) == (1, tuple(range(1, 46)), (10944, 1408))
    assert (hf.head_dim, hf.rotary_dim, hf.rope_theta) == (128, 64, 1e6)
    assert is_beside("model.layers.46.mlp.gate.weight", hf) and not is_beside("model.layers.45.mlp.gate.weight", hf)
    qwen = HFConfig.of(QWEN3_30B)
    assert (qwen.moe_layers, qwen.beside_ffns, qwen.rotary_dim) == (tuple(range(48)), (), 128)


@pytest.mark.parametrize("change, named", [
    ({"n_group": 4}, "n_group"), ({"topk_group": 2}, "topk_group"), ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"first_k_dense_replace": 46}, "first_k_dense_replace"), ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ({"mlp_bias": True}, "mlp_bias"), ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn")])
def test_refuses_what_it_would_route_wrongly(change: dict, named: str) -> None:
    with pytest.raises(UserMistake, match=named):
        HFConfig.of({**GLM_45_AIR, **change})


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match="no such file"):
        HFConfig.read(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B)[:-5])
    with pytest.raises(UserMistake, match="not JSON"):
        HFConfig.read(tmp_path)
    for text, told in ((b"[1]", "not a JSON object"), (b"\xff{}", "not JSON"),
                       (json.dumps(QWEN3_30B | {"rms_norm_eps": "small"}).encode(), "kind .* could not convert")):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(UserMistake, match=told):
            HFConfig.read(tmp_path)
