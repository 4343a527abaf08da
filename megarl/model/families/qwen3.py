"""Qwen3, dense: Llama with RMSNorm on each head's q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.model.families.tables import Implementation, Table, decoder, dense_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = 32
HEAD_DIM = 128
MAX_POSITIONS = 32768
QKV_BIAS = False
QK_NORM = True
HANDLES = ()


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Nothing beyond the common fields."""
    return {}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, dense_mlp(hf, implementation))
