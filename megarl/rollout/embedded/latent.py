"""Multi-head latent attention in the engine: heads made from latent vectors, as the decoder has those of other models.

The cache holds whole heads, not the latent vectors: simple and exact, and this engine's models are small. Values are
filled up with zeros to the size of keys; what is mixed of them is cut again before the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from megarl.model.hf_config import HFConfig


@dataclass(frozen=True)
class LatentWeights:
    """As the checkpoint has them; without latent queries `q_oh` makes them of hidden states, the other two are None."""

    q_down_lh: torch.Tensor | None
    q_norm_l: torch.Tensor | None
    q_oh: torch.Tensor
    kv_down_lh: torch.Tensor
    kv_norm_l: torch.Tensor
    kv_ol: torch.Tensor

    @classmethod
    def make(cls, hf: HFConfig, at: str, new: Callable[..., torch.Tensor]) -> LatentWeights:
        """Room for those of the layer `at`; `new(name, *shape)` makes a tensor."""
        sizes, rows = hf.latent, hf.heads * hf.head_dim
        down = norm = None
        if sizes.q_rank:
            down = new(f"{at}.q_a_proj.weight", sizes.q_rank, hf.hidden)
            norm = new(f"{at}.q_a_layernorm.weight", sizes.q_rank)
        return cls(down, norm, new(f"{at}.q_b_proj.weight", rows, sizes.q_rank) if sizes.q_rank else
                   new(f"{at}.q_proj.weight", rows, hf.hidden),
                   new(f"{at}.kv_a_proj_with_mqa.weight", sizes.kv_rank + sizes.rotated, hf.hidden),
                   new(f"{at}.kv_a_layernorm.weight", sizes.kv_rank),
                   new(f"{at}.kv_b_proj.weight", hf.heads * (sizes.plain + sizes.value), sizes.kv_rank))


def qkv(weights: LatentWeights, hf: HFConfig, normed_th: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """q, k and v heads, [T, 3 * heads, head_dim].

    Args:
        weights, hf: of the layer, the model.
        normed_th: its input.
        cos, sin: [T, 1, head_dim] as `decoder.Tables` has them, of which the rotated dimensions are used.
        norm: RMSNorm of latent vectors with a weight.
    """
    sizes, tokens, cos, sin = hf.latent, len(normed_th), cos[..., :hf.rotary_dim], sin[..., :hf.rotary_dim]
    queries = normed_th if weights.q_down_lh is None else norm(functional.linear(normed_th, weights.q_down_lh),
                                                               weights.q_norm_l)
    q_tnd = functional.linear(queries, weights.q_oh).view(tokens, hf.heads, -1)
    latent, shared = functional.linear(normed_th, weights.kv_down_lh).split((sizes.kv_rank, sizes.rotated), -1)
    kv_tnd = functional.linear(norm(latent, weights.kv_norm_l), weights.kv_ol).view(tokens, hf.heads, -1)
    out = normed_th.new_zeros(tokens, 3, hf.heads, hf.head_dim)
    out[:, 0, :, :sizes.plain] = q_tnd[..., :sizes.plain]
    out[:, 0, :, sizes.plain:] = _rotated(q_tnd[..., sizes.plain:], cos, sin)
    out[:, 1, :, :sizes.plain] = kv_tnd[..., :sizes.plain]
    out[:, 1, :, sizes.plain:] = _rotated(shared.unsqueeze(1), cos, sin)
    out[:, 2, :, :sizes.value] = kv_tnd[..., sizes.plain:]
    return out.flatten(1, 2)


def values_alone(mixed_tq: torch.Tensor, hf: HFConfig) -> torch.Tensor:
    """Cut off what fills values up: [T, heads * head_dim] -> [T, heads * value]."""
    return mixed_tq.unflatten(-1, (hf.heads, hf.head_dim))[..., :hf.latent.value].flatten(1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours turned by an angle each; first all first members, then all second ones."""
    x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
