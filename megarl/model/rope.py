"""Rotary position embedding: inverse frequencies and angles, by each token's position in its own sequence."""

from __future__ import annotations

import math

import torch

from megarl.model.hf_config import HFConfig, Yarn


def inverse_frequencies(hf: HFConfig) -> torch.Tensor:
    """theta^(-2i/d), i = 0 .. d/2-1 (RoFormer, sec. 3.2.2), scaled as in Llama 3.1 or by YaRN where the config says so.

    Llama 3.1: wavelengths above original/low_freq_factor are stretched by `factor`, those below
    original/high_freq_factor are kept, those between are interpolated linearly in original/wavelength.
    YaRN (eq. 20-23): dimensions that turn less than beta_slow times over the original length are stretched by `factor`,
    those that turn more than beta_fast times are kept, those between are interpolated linearly in their number.

    Returns:
        fp32 [d / 2], d the dimensions of a head that are rotated.
    """
    exponents = torch.arange(0, hf.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / hf.rotary_dim
    frequencies = 1.0 / (hf.rope_theta ** exponents)
    scaling = hf.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Yarn):
        slow, fast = (hf.rotary_dim * math.log(scaling.original_max_positions / (beta * 2 * math.pi))
                      / (2 * math.log(hf.rope_theta)) for beta in (scaling.beta_slow, scaling.beta_fast))
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), hf.rotary_dim - 1)
        kept = 1 - ((torch.arange(hf.rotary_dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
        return (1 - kept) * frequencies / scaling.factor + kept * frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # original length / wavelength
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def softmax_factor(hf: HFConfig) -> float:
    """What YaRN multiplies the scale of the scores with, as DeepSeek-V3 has it; 1 without."""
    scaling = hf.rope_scaling
    return (0.1 * scaling.mscale * math.log(scaling.factor) + 1.0) ** 2 if isinstance(scaling, Yarn) else 1.0


def angles(positions_t: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Angles in the layout that Megatron's unfused rotary code takes: fp32 [tokens, 1, 1, rotated dims]."""
    half_td = positions_t.to(torch.float32)[:, None] * frequencies
    return torch.cat((half_td, half_td), dim=-1)[:, None, None, :]
