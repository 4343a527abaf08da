"""Llama 2 and 3 and models of their shape (SmolLM2, ...)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.model.families.tables import Implementation, Table, decoder, dense_mlp

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

KV_HEADS = None  # as many as heads
HEAD_DIM = None  # hidden / heads
MAX_POSITIONS = 2048
QKV_BIAS = False
QK_NORM = False
HANDLES = ()


def sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Nothing beyond the common fields."""
    return {}


def table(hf: HFConfig, implementation: Implementation) -> Table:
    """The names of this family's tensors."""
    return decoder(hf, implementation, dense_mlp(hf, implementation))
