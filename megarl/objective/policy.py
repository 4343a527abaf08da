"""The policy loss of one micro-batch, and what is measured beside it.

The loss is the sum over this micro-batch's response tokens of weight * token loss; the weights carry the global
divisors, so contributions of micro-batches and ranks add up to the loss of the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.objective.correction import correct
from megarl.objective.kl import kl_estimate
from megarl.objective.recipes import Objective

# What `policy_loss` measures: sums over response tokens, and maxima. On every micro-batch the same names. The policy
# ratio of a token that importance sampling masks counts as 1, and as not clipped.
SUMS = ("tokens", "loss", "clipped_low", "clipped_high", "kl_old", "ratio", "entropy", "ref_kl", "engine_gap",
        "engine_kl", "is_weight", "is_cut")
MAXIMA = ("ratio_max", "engine_gap_max")
# ... and, as "by_lag", sums over the tokens of each lag (how many weight versions older than the experience).
BY_LAG = ("tokens", "is_weight", "is_cut", "clipped_low", "clipped_high")


def policy_loss(logprobs_t: torch.Tensor, old_t: torch.Tensor, advantages_t: torch.Tensor, weights_t: torch.Tensor,
                mask_t: torch.Tensor, sequence_t: torch.Tensor, n_seq: int, objective: Objective, *,
                entropy_t: torch.Tensor | None = None, ref_t: torch.Tensor | None = None,
                engine_t: torch.Tensor | None = None, lag_t: torch.Tensor | None = None, lags: int = 1,
                sum_across: Callable[[torch.Tensor], torch.Tensor] = lambda sums_3n: sums_3n,
                ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate with the objective's ratio, correction, KL and entropy terms.

    The ratio is current/old with the weight old/engine (decoupled), or current/engine (naive): see
    `objective.correction`. Where `mask_t` is False every value is selected away, so a NaN there reaches nothing. So is
    the surrogate of a token that importance sampling masks; its KL and entropy terms stay.

    Args:
        logprobs_t: current log-probs of the labels, [T]; gradients flow through them and `entropy_t` only.
        old_t: the trainer's log-probs when the experience was taken (the proximal policy), [T].
        advantages_t, weights_t: of each token's sample, the latter by `advantages.token_weights`, [T].
        mask_t: bool [T], response tokens that are trained on.
        sequence_t, n_seq: int64 [T], which of the micro-batch's n_seq sequences; `n_seq` for what belongs to none.
        objective: the loss.
        entropy_t: entropy of each position's distribution, [T]; needed for the bonus.
        ref_t: log-probs under the reference model, [T]; needed for a KL in the loss.
        engine_t: log-probs by the engine that sampled, [T]; needed for a correction and for the naive ratio.
        lag_t: weight versions between sampling and this experience, whole numbers from 0, [T]; None: all are 0.
        lags: statistics are kept for so many lags, 0 upwards; an older token counts with the last.
        sum_across: sum over the ranks that share each sequence (context parallelism), whose backward is the same sum;
            called once if objective.needs_sequences, else never.

    Returns:
        (loss, statistics): scalar; detached fp64 scalars of this rank's tokens, named as in SUMS and MAXIMA, and
            "by_lag", [len(BY_LAG), lags].

    Raises:
        ValueError: a term of the objective lacks its input.
    """
    _require(objective, entropy_t, ref_t, engine_t)
    logprobs_t, old_t, advantages_t, weights_t, entropy_t, ref_t, engine_t = (
        None if values_t is None else _selected(values_t, mask_t)
        for values_t in (logprobs_t, old_t, advantages_t, weights_t, entropy_t, ref_t, engine_t))
    zeros_t, moved_t = torch.zeros_like(old_t), (logprobs_t - old_t).detach()
    log_ratio_t = logprobs_t - (old_t if objective.proximal == "old" else engine_t)
    gap_t = zeros_t if engine_t is None else (old_t - engine_t).detach()
    sequences_3t = None
    if objective.needs_sequences:
        rows_3t = torch.stack((log_ratio_t, mask_t.to(log_ratio_t.dtype), gap_t))
        sequences_3t = sum_across(_sequence_sums(rows_3t, sequence_t, n_seq))[:, sequence_t]
    is_t, cut_t = correct(objective.correction, gap_t, sequences_3t)
    used_t = mask_t & (is_t != 0)  # a NaN of the engine is no 0: it must not be lost
    ratio_t = _selected(_log_ratio(objective, logprobs_t, log_ratio_t, sequences_3t), used_t).exp()
    surrogate_t, clipped = _surrogate(objective, ratio_t, advantages_t)
    kl_t = zeros_t if ref_t is None else kl_estimate(logprobs_t, ref_t, objective.kl.estimator)
    token_loss_t = _with_terms(objective, _selected(-is_t * surrogate_t, used_t), kl_t, entropy_t)
    loss = (weights_t * token_loss_t).sum()

    measured = clipped | {
        "tokens": mask_t, "kl_old": moved_t.expm1() - moved_t, "ratio": ratio_t, "ref_kl": kl_t,
        "entropy": zeros_t if entropy_t is None else entropy_t, "engine_gap": gap_t.abs(),
        "engine_kl": gap_t.expm1() - gap_t, "is_weight": is_t, "is_cut": cut_t}
    return loss, {**_statistics(measured, mask_t), "loss": loss.detach().double(),
                  "by_lag": _by_lag(measured, zeros_t if lag_t is None else lag_t, mask_t, lags)}


def _with_terms(objective: Objective, token_loss_t: torch.Tensor, kl_t: torch.Tensor, entropy_t: torch.Tensor | None
                ) -> torch.Tensor:
    """The surrogate's loss with the KL and the entropy bonus, [T]."""
    if objective.kl_in_loss:
        token_loss_t = token_loss_t + objective.kl.coefficient * kl_t
    if objective.entropy_bonus:
        token_loss_t = token_loss_t - objective.entropy_bonus * entropy_t
    return token_loss_t


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


def _by_lag(measured: dict[str, torch.Tensor], lag_t: torch.Tensor, mask_t: torch.Tensor, lags: int) -> torch.Tensor:
    """Sums of what BY_LAG names over the masked-in tokens of each lag, fp64 [len(BY_LAG), lags]."""
    rows_kt = torch.stack([_selected(measured[name].detach().double(), mask_t) for name in BY_LAG])
    bucket_t = _selected(lag_t, mask_t).long().clamp(0, lags - 1)
    return rows_kt.new_zeros(len(BY_LAG), lags).index_add(1, bucket_t, rows_kt)


def _require(objective: Objective, entropy_t: torch.Tensor | None, ref_t: torch.Tensor | None,
             engine_t: torch.Tensor | None) -> None:
    needs = (("entropy_t", entropy_t, bool(objective.entropy_bonus)), ("ref_t", ref_t, objective.kl_in_loss),
             ("engine_t", engine_t, objective.needs_engine))
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
