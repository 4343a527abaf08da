"""Tiny Hugging Face checkpoints and packs for the model tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMON = dict(vocab_size=99, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=256, initializer_range=0.08, eos_token_id=1, pad_token_id=0,
              attn_implementation="eager")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", intermediate_size=48),
    "llama_tied": dict(model_type="llama", intermediate_size=48, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)),
    "qwen2": dict(model_type="qwen2", intermediate_size=48),
    "qwen3": dict(model_type="qwen3", intermediate_size=48, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": dict(model_type="qwen3_moe", intermediate_size=48, head_dim=16, moe_intermediate_size=24,
                      num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
    "glm4_moe": dict(model_type="glm4_moe", intermediate_size=48, head_dim=16, moe_intermediate_size=24,
                     n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=2,
                     routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=0),
    "mixtral": dict(model_type="mixtral", intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v3": dict(model_type="deepseek_v3", intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8,
                        num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
                        routed_scaling_factor=2.5, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16,
                        qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4, num_nextn_predict_layers=0,
                        rms_norm_eps=1e-4,  # not of latent vectors
                        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0,
                                             mscale_all_dim=1.0, beta_fast=32, beta_slow=1,
                                             original_max_position_embeddings=64)),
}


def hf_config(name: str, **changes: Any) -> Any:
    """The transformers config of `FAMILIES[name]`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**COMMON, **FAMILIES[name], **changes})


def hf_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model of `FAMILIES[name]`, fp32, with non-zero biases and norms that are not 1."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(name, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif key.endswith("mlp.gate.weight"):
                parameter.mul_(5)  # routing with margins
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def save_hf_model(name: str, folder: Path, seed: int = 0, dtype: Any = None, max_shard_size: str = "5GB",
                  **changes: Any) -> Path:
    """Save it as a checkpoint directory."""
    model = hf_model(name, seed, **changes)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def config_for(path: Path | str, **model: Any) -> Any:
    """A config of a fp32 run of this model."""
    from megarl.config.schema import Config

    megatron = model.pop("megatron", {})
    return Config.model_validate({
        "model": {"path": str(path), "dtype": "fp32", **model}, "data": {"sources": [{"path": "none.jsonl"}]},
        "reward": {"terms": [{"name": "exact"}]}, "megatron": megatron})


def pack(sequences: list[list[int]], cp_size: int = 1, cp_rank: int = 0, multiple: int = 1, total: int = 0,
         pad_id: int = 0) -> Any:
    """What the model takes of a packed batch: each sequence padded to `multiple`, the pack to `total` tokens."""
    import torch

    tokens, positions, padding, where, bounds = [], [], [], [], [0]

    def append(ids: list[int], length: int, index: int) -> None:
        """One sequence; zig-zag: this rank's chunks of it."""
        row = ids + [pad_id] * (length - len(ids))
        chunk = length // (2 * cp_size) if cp_size > 1 else length
        chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        for c in chunks:
            at = range(c * chunk, (c + 1) * chunk)
            tokens.extend(row[p] for p in at)
            positions.extend(at)
            padding.extend(p >= len(ids) for p in at)
            where.extend((index, p) for p in at)
        bounds.append(bounds[-1] + length)

    for index, ids in enumerate(sequences):
        append(ids, -(-len(ids) // multiple) * multiple, index)
    if total > bounds[-1]:
        append([], total - bounds[-1], len(sequences))
    return SimpleNamespace(
        tokens_t=torch.tensor(tokens), positions_t=torch.tensor(positions), padding_t=torch.tensor(padding),
        experts={},
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32), cp_size=cp_size, cp_rank=cp_rank, where=where,
        max_seqlen=max(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)))
