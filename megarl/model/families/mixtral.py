"""Mixtral: Llama's attention, every layer's MLP a softmax-routed mixture of experts (arXiv 2401.04088)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake
from megarl.model.families.tables import Implementation, MLPNames, Table, decoder, moe_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = 8
HEAD_DIM = None  # hidden / heads
MAX_POSITIONS = 131072
QKV_BIAS = False
QK_NORM = False
HANDLES = ()
MLP = MLPNames("block_sparse_moe", "w1", "w3", "w2")


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Experts, as large as the config's MLP. Sliding windows are refused."""
    if raw.get("sliding_window") is not None:
        raise UserMistake(f"sliding_window {raw['sliding_window']} is not supported", f"{where}: sliding_window",
                          "use a checkpoint with full attention")
    experts, top_k = raw.get("num_local_experts", 8), raw.get("num_experts_per_tok", 2)
    if not 1 < top_k <= experts:
        raise UserMistake(f"{top_k} of {experts} experts", f"{where}: num_experts_per_tok", f"use 2 to {experts}")
    return {"experts": experts, "top_k": top_k, "moe_ffn": raw["intermediate_size"], "norm_topk": True}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, moe_mlp(hf, implementation))
