"""DeepSeek-V3 (arXiv 2412.19437) and models of its shape: latent attention; a few dense layers, then experts chosen
from the best groups of them by sigmoid scores and a bias, beside a shared one.

The layers for multi-token prediction behind the model's own are left out of training; conversions keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake
from megarl.model.families.tables import Implementation, Table, decoder, dense_mlp, is_behind_the_layers, moe_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = None  # as many as heads
HEAD_DIM = None  # the latent sizes say
MAX_POSITIONS = 4096
QKV_BIAS = False
QK_NORM = False
HANDLES = ("yarn",)
ignored = is_behind_the_layers


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Latent attention, experts and their groups, the shared expert, dense layers."""
    from megarl.model.hf_config import Latent

    if raw.get("rope_interleave", True) is not True:
        raise UserMistake("rope_interleave false is not supported", f"{where}: rope_interleave",
                          "use a checkpoint with interleaved rotary dimensions")
    if raw.get("norm_topk_prob", True) is not True:
        raise UserMistake("norm_topk_prob false is not supported", f"{where}: norm_topk_prob", "only true is in")
    experts, top_k = raw.get("n_routed_experts", 256), raw.get("num_experts_per_tok", 8)
    groups, taken = raw.get("n_group", 8), raw.get("topk_group", 4)
    if not 1 < top_k <= experts:
        raise UserMistake(f"{top_k} of {experts} experts", f"{where}: num_experts_per_tok", f"use 2 to {experts}")
    if groups > 1 and (experts % groups or taken > groups or top_k != 2 * taken or top_k > taken * experts // groups):
        # a group is scored by its two best experts, in Megatron-core by its top_k / topk_group best
        raise UserMistake(f"{top_k} of {experts} experts from {taken} of {groups} groups", f"{where}: topk_group",
                          "num_experts_per_tok must be twice topk_group, and n_group divide n_routed_experts")
    dense, ffn = raw.get("first_k_dense_replace", 3), raw.get("moe_intermediate_size", 2048)
    if not 0 <= dense < raw["num_hidden_layers"]:
        raise UserMistake(f"{dense} dense layers of {raw['num_hidden_layers']}", f"{where}: first_k_dense_replace",
                          "at least one layer must have experts")
    latent = Latent(raw.get("q_lora_rank", 1536) or 0, raw.get("kv_lora_rank", 512), raw.get("qk_nope_head_dim", 128),
                    raw.get("qk_rope_head_dim", 64), raw.get("v_head_dim", 128))
    return {"latent": latent, "head_dim": latent.plain + latent.rotated, "kv_heads": raw["num_attention_heads"],
            "experts": experts, "top_k": top_k, "moe_ffn": ffn, "norm_topk": True, "dense_layers": dense,
            "shared_ffn": ffn * (raw.get("n_shared_experts", 1) or 0), "router_bias": True,
            "router_groups": groups, "groups_taken": taken if groups > 1 else 1,
            "route_scale": float(raw.get("routed_scaling_factor", 2.5))}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, moe_mlp(hf, implementation), dense_mlp(hf, implementation))
