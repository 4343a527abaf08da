"""The policy loss of one micro-batch, and what is measured beside it.

The loss is the sum over this micro-batch's response tokens of weight * token loss; the weights carry the global
divisors, so contributions of micro-batches and ranks add up to the loss of the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.objective.kl import kl_estimate
from megarl.objective.recipes import Objective

# What `policy_loss` measures: sums over response tokens, and maxima. On every micro-batch the same names. The policy
# ratio of a token that importance sampling masks counts as 1, and as not clipped.
SUMS = ("tokens", "loss", "clipped_low", "clipped_high", "kl_old", "ratio", "entropy", "ref_kl", "engine_gap",
        "engine_kl", "is_weight", "is_cut")
MAXIMA = ("ratio_max", "engine_gap_max")


def policy_loss(logprobs_t: torch.Tensor, old_t: torch.Tensor, advantages_t: torch.Tensor, weights_t: torch.Tensor,
                mask_t: torch.Tensor, sequence_t: torch.Tensor, n_seq: int, objective: Objective, *,
                entropy_t: torch.Tensor | None = None, ref_t: torch.Tensor | None = None,
                engine_t: torch.Tensor | None = None,
                sum_across: Callable[[torch.Tensor], torch.Tensor] = lambda sums_3n: sums_3n,
                ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate with the objective's ratio, correction, KL and entropy terms.

    Where `mask_t` is False every value is selected away, so a NaN there reaches neither the loss nor a gradient. So is
    the surrogate of a token that importance sampling masks; its KL and entropy terms stay.

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
        sum_across: sum over the ranks that share each sequence (context parallelism), whose backward is the same sum;
            called once if objective.needs_sequences, else never.

    Returns:
        (loss, statistics): scalar; detached fp64 scalars named as in SUMS and MAXIMA, of this rank's tokens.

    Raises:
        ValueError: a term of the objective lacks its input.
    """
    _require(objective, entropy_t, ref_t, engine_t)
    logprobs_t, old_t, advantages_t, weights_t, entropy_t, ref_t, engine_t = (
        None if values_t is None else _selected(values_t, mask_t)
        for values_t in (logprobs_t, old_t, advantages_t, weights_t, entropy_t, ref_t, engine_t))
    zeros_t, log_ratio_t = torch.zeros_like(old_t), logprobs_t - old_t
    gap_t = zeros_t if engine_t is None else (old_t - engine_t).detach()
    sequences_3t = None
    if objective.needs_sequences:
        sums_3n = _sequence_sums(torch.stack((log_ratio_t, mask_t.to(log_ratio_t.dtype), gap_t)), sequence_t, n_seq)
        sequences_3t = sum_across(sums_3n)[:, sequence_t]
    is_t, cut_t = _correction(objective, gap_t, sequences_3t)
    used_t = mask_t & (is_t != 0)  # a NaN of the engine is no 0: it must not be lost
    ratio_t = _selected(_log_ratio(objective, logprobs_t, log_ratio_t, sequences_3t), used_t).exp()
    surrogate_t, clipped = _surrogate(objective, ratio_t, advantages_t)
    token_loss_t = _selected(-is_t * surrogate_t, used_t)
    kl_t = zeros_t if ref_t is None else kl_estimate(logprobs_t, ref_t, objective.kl.estimator)
    if objective.kl_in_loss:
        token_loss_t = token_loss_t + objective.kl.coefficient * kl_t
    if objective.entropy_bonus:
        token_loss_t = token_loss_t - objective.entropy_bonus * entropy_t
    loss = (weights_t * token_loss_t).sum()

    measured = clipped | {
        "tokens": mask_t, "kl_old": log_ratio_t.expm1() - log_ratio_t, "ratio": ratio_t, "ref_kl": kl_t,
        "entropy": zeros_t if entropy_t is None else entropy_t, "engine_gap": gap_t.abs(),
        "engine_kl": gap_t.expm1() - gap_t, "is_weight": is_t, "is_cut": cut_t}
    return loss, _statistics(measured, mask_t) | {"loss": loss.detach().double()}


def _sequence_sums(rows_3t: torch.Tensor, sequence_t: torch.Tensor, n_seq: int) -> torch.Tensor:
    """Sums over this rank's tokens of each sequence, [3, n_seq + 1]; the last column is for the tokens of none."""
    return rows_3t.new_zeros(3, n_seq + 1).index_add(1, sequence_t, rows_3t)


def _selected(values_t: torch.Tensor, mask_t: torch.Tensor) -> torch.Tensor:
    """The values where `mask_t`, 0 elsewhere, whatever is there; so is the gradient."""
    return torch.where(mask_t, values_t, torch.zeros_like(values_t))


def _statistics(measured: dict[str, torch.Tensor], mask_t: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of `measured` over the masked-in tokens and the maxima, detached fp64; those of no tokens are 0."""
    values = {name: _selected(values_t.detach().double(), mask_t) for name, values_t in measured.items()}
    sums = {name: values_t.sum() for name, values_t in values.items()}
    return sums | {name: values[name.removesuffix("_max")].max() if len(mask_t) else sums["tokens"]
                   for name in MAXIMA}


def _require(objective: Objective, entropy_t: torch.Tensor | None, ref_t: torch.Tensor | None,
             engine_t: torch.Tensor | None) -> None:
    needs = (("entropy_t", entropy_t, bool(objective.entropy_bonus)), ("ref_t", ref_t, objective.kl_in_loss),
             ("engine_t", engine_t, objective.correction.kind != "none"))
    for name, given, needed in needs:
        if needed and given is None:
            raise ValueError(f"the objective needs {name}")


def _log_ratio(objective: Objective, logprobs_t: torch.Tensor, log_ratio_t: torch.Tensor,
               sequences_3t: torch.Tensor | None) -> torch.Tensor:
    """Log of each token's importance ratio, [T]: its own, or the mean of its sequence (GSPO, eq. 7)."""
    if objective.ratio == "token":
        return log_ratio_t
    mean_t = sequences_3t[0] / sequences_3t[1].detach().clamp(min=1)
    if objective.ratio == "sequence":
        return mean_t
    return mean_t.detach() + (logprobs_t - logprobs_t.detach())  # GSPO-token, eq. 14


def _surrogate(objective: Objective, ratio_t: torch.Tensor, advantages_t: torch.Tensor
               ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate, to be maximised (Schulman et al. 2017, eq. 7), and where the clip took its gradient."""
    clipped_t = ratio_t.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    surrogate_t = torch.minimum(ratio_t * advantages_t, clipped_t * advantages_t)
    return surrogate_t, {"clipped_low": (advantages_t < 0) & (ratio_t < clipped_t),
                         "clipped_high": (advantages_t > 0) & (ratio_t > clipped_t)}


def _correction(objective: Objective, gap_t: torch.Tensor, sequences_3t: torch.Tensor | None
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weight of the engine's samples under the proximal policy, and where it was cut or masked, both [T].

    By token, exp(old - engine); by sequence, the product of those over the sequence. Truncated: at most `high`
    (Yao et al. 2025, truncated importance sampling). Masked: 0 outside [low, high]. No gradient flows through it.
    """
    correction = objective.correction
    if correction.kind == "none":
        return torch.ones_like(gap_t), torch.zeros_like(gap_t, dtype=torch.bool)
    weight_t = (gap_t if correction.level == "token" else sequences_3t[2].detach()).exp()
    if correction.kind == "truncated":
        return weight_t.clamp(max=correction.high), weight_t > correction.high
    outside_t = (weight_t < correction.low) | (weight_t > correction.high)
    return torch.where(outside_t, torch.zeros_like(weight_t), weight_t), outside_t
