"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over packs, for the local layers.

Megatron-core's module with three things of its own: rotary angles by each token's position in its sequence, which come
with the pack; down-projections that are whole on every tensor-parallel rank; latent norms with DeepSeek's epsilon.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.model.attention import LocalPack
from megarl.model.hf_config import Latent
from megarl.model.norm import RMSNorm


class PackedLatentAttention(MLASelfAttention):
    """Latent attention; the down-projections that its spec names are only stand-ins."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # cut over tensor-parallel ranks, as Megatron-core's local layers have them, the shared part of the keys would
        # get the gradient of this rank's heads only, with logits that are right (0.16.1, off by 4 % of the largest
        # gradient at TP2); as they are here, it is summed over the ranks
        self.linear_kv_down_proj = Whole(config, config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Whole(config, config.hidden_size, config.q_lora_rank)
        self.rotary_pos_emb = _Angles()

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, key_value_states: Any = None,
                                    position_ids: Any = None, packed_seq_params: LocalPack | None = None,
                                    **kwargs: Any) -> Any:
        """Queries and keys [tokens, heads, plain + rotated], values [tokens, heads, value], and the latent vectors."""
        self.rotary_pos_emb.angles_t1d = packed_seq_params.angles_t1d
        return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, packed_seq_params,
                                                   **kwargs)


class Whole(torch.nn.Module):
    """y = x w^T with the same w on all tensor-parallel ranks; under sequence parallelism each has its share of x."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums over the ranks then

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens, 1, outputs], and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class LatentNorm(RMSNorm):
    """RMSNorm of a latent vector."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=Latent.NORM_EPS)


class _Angles(torch.nn.Module):
    """What Megatron-core takes for its rotary embedding: gives the angles of the pack at hand."""

    angles_t1d: torch.Tensor | None = None

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Not needed."""
        return 0

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """fp32 [tokens, 1, rotated dimensions]."""
        return self.angles_t1d
