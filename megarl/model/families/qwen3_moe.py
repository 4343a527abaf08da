"""Qwen3-MoE: Qwen3's attention, every layer's MLP a softmax-routed mixture of experts without shared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake
from megarl.model.families.tables import Implementation, Table, decoder, moe_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = 4
HEAD_DIM = None  # hidden / heads
MAX_POSITIONS = 32768
QKV_BIAS = False
QK_NORM = True
HANDLES = ()


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Experts. Layers without experts are refused."""
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        key = "mlp_only_layers" if raw.get("mlp_only_layers") else "decoder_sparse_step"
        raise UserMistake(f"{key} {raw[key]!r} is not supported", f"{where}: {key}", "every layer must have experts")
    experts = raw.get("num_experts", raw.get("num_local_experts", 128))
    top_k = raw.get("num_experts_per_tok", 8)
    if not 1 <= top_k <= experts:
        raise UserMistake(f"{top_k} of {experts} experts", f"{where}: num_experts_per_tok", f"use 1 to {experts}")
    norm_topk = bool(raw.get("norm_topk_prob", False))
    if top_k == 1 and norm_topk:
        raise UserMistake("with one expert per token its normalised weight is always 1 and the router cannot learn",
                          f"{where}: norm_topk_prob", "set norm_topk_prob to false, or use more experts per token")
    return {"experts": experts, "top_k": top_k, "moe_ffn": raw.get("moe_intermediate_size", 768),
            "norm_topk": norm_topk}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, moe_mlp(hf, implementation))
