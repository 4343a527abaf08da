"""The policy loss of one micro-batch, and what is measured beside it.

The loss is the sum over this micro-batch's response tokens of weight * token loss; the weights carry the global
divisors, so contributions of micro-batches and ranks add up to the loss of the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.objective.kl import kl_estimate
from megarl.objective.recipes import Objective

# What `policy_loss` measures: sums over response tokens, and maxima. On every micro-batch the same names.
SUMS = ("tokens", "loss", "clipped_low", "clipped_high", "kl_old", "ratio", "entropy", "ref_kl", "engine_gap",
        "engine_kl", "is_weight", "is_cut")
MAXIMA = ("ratio_max", "engine_gap_max")


def policy_loss(logprobs_t: torch.Tensor, old_t: torch.Tensor, advantages_t: torch.Tensor, weights_t: torch.Tensor,
                mask_t: torch.Tensor, sequence_t: torch.Tensor, n_seq: int, objective: Objective, *,
                entropy_t: torch.Tensor | None = None, ref_t: torch.Tensor | None = None,
                engine_t: torch.Tensor | None = None,
                sum_across: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
                ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate with the objective's ratio, correction, KL and entropy terms.

    Where `mask_t` is False every value is selected away, so a NaN there reaches neither the loss nor a gradient.

    Args:
        logprobs_t: current log-probs of the labels, [T]; gradients flow through them and `entropy_t` only.
        old_t: the trainer's log-probs when the experience was taken (the proximal policy), [T].
        advantages_t: [T].
        weights_t: `advantages.token_weights` of each token's sample, [T].
        mask_t: bool [T], response tokens that are trained on.
        sequence_t: int64 [T], which sequence of the micro-batch; `n_seq` for what belongs to none.
        n_seq: sequences in the micro-batch.
        objective: the loss.
        entropy_t: entropy of each position's distribution, [T]; needed for the bonus.
        ref_t: log-probs under the reference model, [T]; needed for a KL in the loss.
        engine_t: log-probs by the engine that sampled, [T]; needed for a correction.
        sum_across: differentiable sum over the ranks that share each sequence (context parallelism).

    Returns:
        (loss, statistics): scalar; detached scalars named as in SUMS and MAXIMA, of this rank's tokens.

    Raises:
        ValueError: a term of the objective lacks its input.
    """
    def selected(values_t: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_t, values_t, torch.zeros_like(values_t))

    _require(objective, entropy_t, ref_t, engine_t)
    logprobs_t, old_t = selected(logprobs_t), selected(old_t)
    log_ratio_t = logprobs_t - old_t
    gap_t = selected(old_t - engine_t) if engine_t is not None else torch.zeros_like(old_t)
    rows = torch.stack((log_ratio_t, mask_t.to(log_ratio_t.dtype), gap_t))
    sums_3n = sum_across(rows.new_zeros(3, n_seq + 1).index_add(1, sequence_t, rows))
    ratio_t = _ratio(objective.ratio, logprobs_t, log_ratio_t, sums_3n, sequence_t)

    advantages_t = selected(advantages_t)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    surrogate_t = torch.minimum(ratio_t * advantages_t, ratio_t.clamp(low, high) * advantages_t)
    is_t, cut_t = _correction(objective, gap_t, sums_3n[2].detach()[sequence_t])
    token_loss_t = -is_t * surrogate_t
    ref_kl_t = torch.zeros_like(old_t)
    if ref_t is not None:
        kl_t = kl_estimate(logprobs_t, selected(ref_t), objective.kl.estimator)
        ref_kl_t = kl_t.detach()
        if objective.kl_in_loss:
            token_loss_t = token_loss_t + objective.kl.coefficient * kl_t
    if objective.entropy_bonus:
        token_loss_t = token_loss_t - objective.entropy_bonus * selected(entropy_t)
    loss = selected(weights_t * token_loss_t).sum()

    with torch.no_grad():
        negative_t, positive_t = advantages_t < 0, advantages_t > 0
        measured = {
            "tokens": mask_t, "clipped_low": mask_t & negative_t & (ratio_t < low),
            "clipped_high": mask_t & positive_t & (ratio_t > high),
            "kl_old": log_ratio_t.expm1() - log_ratio_t, "ratio": ratio_t, "ref_kl": ref_kl_t,
            "entropy": entropy_t if entropy_t is not None else torch.zeros_like(old_t),
            "engine_gap": gap_t.abs(), "engine_kl": gap_t.expm1() - gap_t, "is_weight": is_t, "is_cut": cut_t}
        stats = {name: selected(values_t.double()).sum() for name, values_t in measured.items()}
        stats["loss"] = loss.detach().double()
        for name, values_t in (("ratio_max", ratio_t), ("engine_gap_max", gap_t.abs())):
            stats[name] = selected(values_t.double()).max() if len(values_t) else values_t.new_zeros(()).double()
    return loss, stats


def _require(objective: Objective, entropy_t: torch.Tensor | None, ref_t: torch.Tensor | None,
             engine_t: torch.Tensor | None) -> None:
    needs = (("entropy_t", entropy_t, bool(objective.entropy_bonus)), ("ref_t", ref_t, objective.kl_in_loss),
             ("engine_t", engine_t, objective.correction.kind != "none"))
    for name, given, needed in needs:
        if needed and given is None:
            raise ValueError(f"the objective needs {name}")


def _ratio(level: str, logprobs_t: torch.Tensor, log_ratio_t: torch.Tensor, sums_3n: torch.Tensor,
           sequence_t: torch.Tensor) -> torch.Tensor:
    """Importance ratio of each token, [T]: its own, or its sequence's exp(mean log-ratio)."""
    if level == "token":
        return log_ratio_t.exp()
    sequence_ratio_t = (sums_3n[0] / sums_3n[1].detach().clamp(min=1)).exp()[sequence_t]
    if level == "sequence":
        return sequence_ratio_t
    return sequence_ratio_t.detach() * (logprobs_t - logprobs_t.detach()).exp()  # GSPO, eq. 14


def _correction(objective: Objective, gap_t: torch.Tensor, sequence_gap_t: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weight of the engine's samples under the proximal policy, and where it was cut or masked, both [T].

    By token, exp(old - engine); by sequence, the product of those over the sequence. Truncated: at most `high`
    (Yao et al. 2025, truncated importance sampling). Masked: 0 outside [low, high].
    """
    correction = objective.correction
    if correction.kind == "none":
        return torch.ones_like(gap_t), torch.zeros_like(gap_t, dtype=torch.bool)
    weight_t = (gap_t if correction.level == "token" else sequence_gap_t).exp()
    if correction.kind == "truncated":
        return weight_t.clamp(max=correction.high), weight_t > correction.high
    outside_t = (weight_t < correction.low) | (weight_t > correction.high)
    return torch.where(outside_t, torch.zeros_like(weight_t), weight_t), outside_t
