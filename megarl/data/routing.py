"""Which experts an engine routed each token to: checked and made small when they arrive. Numpy only.

An engine names k experts for each layer and each token but a sample's last one, which it never computed. That token,
and every other without a row, is marked *free*: training routes it by its own choice.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig


@dataclass(frozen=True)
class RoutingShape:
    """The routing of one token.

    Attributes:
        layers: of the model; engines send rows for all of them.
        moe_layers: numbers of those that have experts; only theirs are kept.
        experts: in each such layer.
        top_k: experts of a token.
    """

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int

    @classmethod
    def of(cls, hf: HFConfig) -> RoutingShape:
        """Of a MoE model."""
        return cls(hf.layers, hf.moe_layers, hf.experts, hf.top_k)

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every expert's number and one more."""
        return np.dtype(np.uint8 if self.experts < 256 else np.uint16)

    @property
    def free(self) -> int:
        """What stands in place of an expert's number where a token is free."""
        return int(np.iinfo(self.dtype).max)

    @property
    def token_bytes(self) -> int:
        """Of one token."""
        return len(self.moe_layers) * self.top_k * self.dtype.itemsize

    def decode(self, text: str, tokens: int) -> np.ndarray:
        """SGLang's `routed_experts`, base64 of int32 [tokens, layers, k], as `dtype` [tokens, MoE layers, k].

        Raises:
            ValueError: it is not base64, has another size, an expert that the model does not have, or one twice for a
                token, as rows have that an engine never filled in.
        """
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"routed_experts is not base64: {error}") from None
        expected = 4 * tokens * self.layers * self.top_k
        if len(raw) != expected:
            raise ValueError(f"routed_experts has {len(raw)} bytes, {tokens} tokens x {self.layers} layers x "
                             f"{self.top_k} experts have {expected}")
        whole = np.frombuffer(raw, "<i4").reshape(tokens, self.layers, self.top_k)[:, list(self.moe_layers)]
        if whole.size and not (whole.min() >= 0 and whole.max() < self.experts):
            raise ValueError(f"routed_experts in [{whole.min()}, {whole.max()}], the model has {self.experts} experts")
        found = whole.astype(self.dtype)
        ordered = np.sort(found, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("routed_experts names an expert twice for a token of one layer")
        return found


@dataclass(frozen=True)
class ReplayShare:
    """What one rank replays.

    Attributes:
        shape: of the model.
        layers: numbers of the MoE layers that this rank holds.
        tp_rank, tp_size: this rank's share of a pack's tokens under sequence parallelism; 0 of 1 without.
    """

    shape: RoutingShape
    layers: tuple[int, ...]
    tp_rank: int = 0
    tp_size: int = 1

    def cut(self, experts_tlk: np.ndarray) -> dict[int, np.ndarray]:
        """By layer the experts [tokens here, k], of those [tokens of this context-parallel rank, MoE layers, k]."""
        tokens = len(experts_tlk) // self.tp_size
        mine = experts_tlk[self.tp_rank * tokens:(self.tp_rank + 1) * tokens]
        return {layer: np.ascontiguousarray(mine[:, self.shape.moe_layers.index(layer)]) for layer in self.layers}


def flattened(samples: list[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """The experts of many samples, [sum of tokens, MoE layers, k]; None if no sample has any.

    Args:
        samples: of each its experts [rows, MoE layers, k] of the first tokens (or None), and its tokens. Those without
            a row are free.
    """
    known = next((experts for experts, _ in samples if experts is not None), None)
    if known is None:
        return None
    whole = np.full((sum(tokens for _, tokens in samples), *known.shape[1:]), np.iinfo(known.dtype).max, known.dtype)
    start = 0
    for experts, tokens in samples:
        if experts is not None:
            if len(experts) >= max(tokens, 1):
                raise ValueError(f"{len(experts)} rows of experts for {tokens} tokens: the last one has none")
            whole[start:start + len(experts)] = experts
        start += tokens
    return whole
