"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.model.families.tables import Implementation, Table, decoder, dense_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = 32
HEAD_DIM = None  # hidden / heads
MAX_POSITIONS = 32768
QKV_BIAS = True
QK_NORM = False
HANDLES = ()


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Nothing beyond the common fields."""
    return {}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, dense_mlp(hf, implementation))
