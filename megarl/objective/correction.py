"""From the policy that sampled to the policy that the ratio is taken against: importance weights, and what is rejected.

Three policies meet in an update: the behaviour policy (the engine, when it sampled the token), the proximal policy (the
trainer's weights when the experience was taken: the old log-probs) and the current one. The decoupled objective (Hilton
et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.2) is

    E[ proximal/behaviour * min(current/proximal * A, clip(current/proximal, 1 - low, 1 + high) * A) ]

so the clip holds the update near the proximal policy, however old the samples are, and the weight in front corrects for
their age and for the engine's other arithmetic. That weight has no bound, hence:

    truncated   at most `high` (truncated importance sampling, Yao et al. 2025)
    masked      0 outside [low, high], by token (IcePop, arXiv 2510.18855) or by sequence (masked importance sampling,
                Liu et al. 2025)
    reject      the surrogate of a token is left out if proximal/behaviour at another level is outside its bounds,
                whatever its weight is (by the geometric mean: Geo-RS of Liu et al. 2025)

Levels: `token`, proximal/behaviour of the token; `sequence`, the product over the sequence's trained tokens;
`geometric`, the geometric mean of those (the form that GSPO's own ratio has). What is masked or rejected leaves the
numerator; every divisor stays.
"""

from __future__ import annotations

import torch

from megarl.config.schema import CorrectionConfig


def correct(correction: CorrectionConfig, gap_t: torch.Tensor, sequences_3t: torch.Tensor | None
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of each token, and whether it was truncated, masked or rejected, both [T]. No gradient flows.

    A NaN of the engine stays a NaN: it must not pass as a weight of 0 or 1.

    Args:
        correction: what to do.
        gap_t: log of proximal/behaviour of each token, [T].
        sequences_3t: sums over each token's sequence, [3, T]; its second row are the trained tokens, its third the
            gaps. None where no level needs them.
    """
    gap_t = gap_t.detach()
    weight_t, cut_t = torch.ones_like(gap_t), torch.zeros_like(gap_t, dtype=torch.bool)
    if correction.kind != "none":
        weight_t = _at(correction.level, gap_t, sequences_3t)
        if correction.kind == "truncated":
            weight_t, cut_t = weight_t.clamp(max=correction.high), weight_t > correction.high
        else:
            cut_t = (weight_t < correction.low) | (weight_t > correction.high)
    if correction.reject != "none":
        judged_t = _at(correction.reject, gap_t, sequences_3t)
        rejected_t = (judged_t < correction.reject_low) | (judged_t > correction.reject_high)
        weight_t = torch.where(judged_t.isnan(), judged_t, weight_t)
        cut_t, weight_t = cut_t | rejected_t, torch.where(rejected_t, torch.zeros_like(weight_t), weight_t)
    if correction.kind == "masked":
        weight_t = torch.where(cut_t, torch.zeros_like(weight_t), weight_t)
    return weight_t, cut_t


def _at(level: str, gap_t: torch.Tensor, sequences_3t: torch.Tensor | None) -> torch.Tensor:
    """proximal/behaviour at a level, [T]."""
    if level == "token":
        return gap_t.exp()
    _, count_t, sum_t = sequences_3t.detach()
    return (sum_t if level == "sequence" else sum_t / count_t.clamp(min=1)).exp()
