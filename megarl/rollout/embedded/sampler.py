"""From logits to tokens: vectorised over rows, each row with its own parameters and its own random numbers.

A row's token depends on its logits, its parameters and (seed, position) alone, never on the other rows.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN, _MIX1, _MIX2 = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
OFF_TOP_K = 1 << 30  # above any vocabulary


def _mix(state_r: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    state_r = (state_r ^ (state_r >> np.uint64(30))) * _MIX1
    state_r = (state_r ^ (state_r >> np.uint64(27))) * _MIX2
    return state_r ^ (state_r >> np.uint64(31))


def seed_keys(seeds_r: np.ndarray) -> np.ndarray:
    """What `uniforms` takes of seeds; both uint64 [R]. Neighbouring seeds get unrelated keys."""
    return _mix(seeds_r + _GOLDEN)


def uniforms(keys_r: np.ndarray, positions_r: np.ndarray) -> np.ndarray:
    """float64 [R] in [0, 1), multiples of 2^-52: a hash of (seed, position); both uint64 [R].

    A counter-based generator has no state: the number of a position is the same whenever and wherever it is asked.
    """
    return (_mix(keys_r + (positions_r + np.uint64(1)) * _GOLDEN) >> np.uint64(12)).astype(np.float64) * 2.0**-52


@torch.inference_mode()
def sample(logits_rv: torch.Tensor, temperature_r: np.ndarray, top_p_r: np.ndarray, top_k_r: np.ndarray,
           min_p_r: np.ndarray, uniforms_r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row.

    Args:
        logits_rv: float32 [R, vocab].
        temperature_r: float32 [R]; 0 is greedy.
        top_p_r, min_p_r: float64 [R]; 1 and 0 are off.
        top_k_r: int64 [R]; OFF_TOP_K is off.
        uniforms_r: float64 [R] in [0, 1).
    Returns:
        tokens int64 [R]; log-probs float32 [R]: log_softmax(logits / temperature) at the token, before any
        truncation, at temperature 1 for greedy rows. A row whose logits are not finite gets a log-prob that is not.
    """
    greedy_r = temperature_r == 0
    heat_r = np.where(greedy_r, np.float32(1), temperature_r)
    scaled_rv = logits_rv if (heat_r == 1).all() else logits_rv / torch.from_numpy(heat_r).unsqueeze(1)
    logprobs_rv = scaled_rv.log_softmax(-1)
    if greedy_r.all():
        tokens_r = logits_rv.argmax(-1)
    else:
        probs_rv = logprobs_rv.exp()
        if (top_p_r < 1).any() or (top_k_r < logits_rv.shape[1]).any() or (min_p_r > 0).any():
            probs_rv = _truncated(probs_rv, top_p_r, top_k_r, min_p_r)
        cumulated_rv = probs_rv.cumsum(-1, dtype=torch.float64)
        drawn_r1 = cumulated_rv[:, -1:] * torch.from_numpy(uniforms_r).unsqueeze(1)
        # first token whose cumulated probability exceeds the draw, so never one of probability 0
        tokens_r = torch.searchsorted(cumulated_rv, drawn_r1, right=True).squeeze(1).clamp_(max=logits_rv.shape[1] - 1)
        if greedy_r.any():
            tokens_r = torch.where(torch.from_numpy(greedy_r), logits_rv.argmax(-1), tokens_r)
    return tokens_r.numpy(), logprobs_rv.gather(1, tokens_r.unsqueeze(1)).squeeze(1).numpy()


def _truncated(probs_rv: torch.Tensor, top_p_r: np.ndarray, top_k_r: np.ndarray, min_p_r: np.ndarray) -> torch.Tensor:
    """Probabilities with those outside top-k, top-p and min-p set to 0, not renormalised.

    Kept are the k likeliest; of all, in falling order, those before which less than top_p has been cumulated (so the
    likeliest always); and those of at least min_p times the likeliest. All three look at the whole distribution.
    """
    falling_rv, order_rv = probs_rv.sort(stable=True, dim=-1, descending=True)
    before_rv = falling_rv.cumsum(-1, dtype=torch.float64) - falling_rv
    top_p_r1, top_k_r1, min_p_r1 = (torch.from_numpy(values).unsqueeze(1) for values in (top_p_r, top_k_r, min_p_r))
    keep_rv = ((before_rv < top_p_r1) | (top_p_r1 >= 1)) & (torch.arange(probs_rv.shape[1]) < top_k_r1)
    keep_rv &= falling_rv >= falling_rv[:, :1] * min_p_r1
    return torch.where(torch.zeros_like(keep_rv).scatter_(1, order_rv, keep_rv), probs_rv, 0)
