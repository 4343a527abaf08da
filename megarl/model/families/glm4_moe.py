"""GLM-4.5 and later GLM-4 MoE models: a few dense layers, then experts chosen as in DeepSeek-V3 beside a shared one.

Attention is grouped-query with rotation of a part of each head. A router scores by sigmoid; a bias, moved by balancing
and never trained, is added to choose experts, not to weigh them (DeepSeek-V3, arXiv 2412.19437, eq. 12-16). The layers
for multi-token prediction that some checkpoints carry behind the model's own are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake
from megarl.model.families.tables import Implementation, Table, decoder, dense_mlp, is_behind_the_layers, moe_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = 8
HEAD_DIM = None  # hidden / heads
MAX_POSITIONS = 131072
QKV_BIAS = False  # attention_bias says
QK_NORM = False  # use_qk_norm says
HANDLES = ("attention_bias", "partial_rotary_factor")


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Experts, the shared one, dense layers, attention's variants. Groups of experts are refused."""
    experts, top_k = raw.get("n_routed_experts", 128), raw.get("num_experts_per_tok", 8)
    if not 1 < top_k <= experts:
        raise UserMistake(f"{top_k} of {experts} experts", f"{where}: num_experts_per_tok", f"use 2 to {experts}")
    for key, only in (("n_group", 1), ("topk_group", 1), ("norm_topk_prob", True)):
        if raw.get(key, only) != only:
            raise UserMistake(f"{key} {raw[key]!r} is not supported", f"{where}: {key}", f"only {only} is in")
    ffn, dense = raw.get("moe_intermediate_size", 1408), raw.get("first_k_dense_replace", 1)
    if not 0 <= dense < raw["num_hidden_layers"]:
        raise UserMistake(f"{dense} dense layers of {raw['num_hidden_layers']}", f"{where}: first_k_dense_replace",
                          "at least one layer must have experts")
    rope = raw.get("rope_parameters") or {}
    return {"experts": experts, "top_k": top_k, "moe_ffn": ffn, "norm_topk": True,
            "shared_ffn": ffn * raw.get("n_shared_experts", 1), "dense_layers": dense, "router_bias": True,
            "route_scale": float(raw.get("routed_scaling_factor", 1.0)),
            "qkv_bias": bool(raw.get("attention_bias", False)), "qk_norm": bool(raw.get("use_qk_norm", False)),
            "rotated": float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.5)))}


ignored = is_behind_the_layers


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, moe_mlp(hf, implementation), dense_mlp(hf, implementation))
