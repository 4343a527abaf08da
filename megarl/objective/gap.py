"""The gap between what the engine said of its tokens and what the trainer says: |old - engine| log-prob, by lag.

A token that the newest weights sampled should have the same log-prob on both sides, to the engine's arithmetic. If it
does not, something is wrong that importance weights would only hide: this is where it is told, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.config.schema import GapAlarmConfig

ROWS = ("tokens", "gap", "kl", "lag")
_FEW = 0.01  # a lag with a smaller share of the tokens is not judged: its mean says little

CAUSES = ("the engine's weights are not those it names (a failed or skipped publish); it computes in another dtype or "
          "with other kernels (a MoE: other experts, see replay); it samples otherwise (temperature, a template, "
          "tokens encoded again)")


def gap_by_lag(old_t: torch.Tensor, engine_t: torch.Tensor, lag_t: torch.Tensor, mask_t: torch.Tensor, lags: int
               ) -> torch.Tensor:
    """Sums over the trained tokens of each lag, fp64 [len(ROWS), lags]; an older token counts with the last lag.

    `kl` is Schulman's k3 of KL(engine || old); `lag` sums the true lags.
    """
    gap_k, lag_k = (old_t - engine_t)[mask_t].double(), lag_t[mask_t].double()
    rows_4k = torch.stack((torch.ones_like(gap_k), gap_k.abs(), gap_k.expm1() - gap_k, lag_k))
    return rows_4k.new_zeros(len(ROWS), lags).index_add(1, lag_k.long().clamp(0, lags - 1), rows_4k)


def gap_metrics(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """lag/mean, and for each lag that has tokens its share and its mean gap and KL; {} where there is one lag only."""
    tokens = sum(sums[0])
    if len(sums[0]) < 2 or not tokens:
        return {}
    values = {"lag/mean": sum(sums[3]) / tokens}
    for lag, (count, gap, kl, _) in enumerate(zip(*sums, strict=True)):
        values[f"lag/{lag}/share"] = count / tokens
        if count:
            values |= {f"lag/{lag}/gap": gap / count, f"lag/{lag}/kl": kl / count}
    return values


def judge(sums: Sequence[Sequence[float]], alarm: GapAlarmConfig, step: int) -> str | None:
    """What is wrong with the gap of a step's samples, in one line; None if nothing is.

    Judged are the tokens of the smallest lag that has a hundredth of all. Each version of lag adds the threshold again:
    the policy may have moved by so much. A gap that is not a number is always wrong.

    Args:
        sums: from `gap_by_lag`, over the whole step and all ranks.
    """
    tokens = sum(sums[0])
    if alarm.action == "off" or not tokens:
        return None
    lag = next(lag for lag, count in enumerate(sums[0]) if count >= _FEW * tokens)
    gap, limit = sums[1][lag] / sums[0][lag], alarm.threshold * (lag + 1)
    if gap <= limit:
        return None
    return (f"step {step}: engine and trainer disagree: mean |log-prob gap| {gap:.3g} over {int(sums[0][lag])} tokens "
            f"of lag {lag}, above {limit:g}. Likely causes: {CAUSES}")
