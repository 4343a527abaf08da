"""RMSNorm for the local implementation: Megatron-core's own refuses sequence parallelism without TE or apex."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """`x / rms(x) * weight` over the last dimension (Zhang & Sennrich 2019), with the signature of a Megatron norm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # finalize_model_grads all-reduces the gradients of such parameters over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel
