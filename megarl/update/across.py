"""Sums across ranks: the differentiable one of the objective, and the statistics of an optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.objective.policy import BY_LAG, MAXIMA, SUMS


class _SumWithGradient(torch.autograd.Function):
    """y = sum over ranks of x. Every rank's loss may use y, so x's gradient is the sum over ranks of y's."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_with_gradient(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over `group` (None: this rank alone), differentiable on every rank."""
    return values if group is None else _SumWithGradient.apply(values, group)


def policy_statistics(stats: list[dict[str, torch.Tensor] | None], groups: Groups, lags: int = 1) -> dict[str, float]:
    """The objective's statistics of an optimizer step, over all ranks; the same on every trainer.

    Args:
        stats: of each micro-batch, as `objective.policy.policy_loss` gives them; None where its loss is not computed.
        lags: how many lags its statistics tell apart; from 2 on, lag/<k>/is_weight, is_cut and clip_fraction are of
            the tokens of lag k, absent if there is none.
    """
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device.current())
    maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device.current())
    by_lag = torch.zeros(len(BY_LAG), lags, dtype=torch.float64, device=device.current())
    if groups.tp == 0:
        for one in filter(None, stats):
            sums += torch.stack([one[name] for name in SUMS])
            maxima = torch.maximum(maxima, torch.stack([one[name] for name in MAXIMA]))
            by_lag += one["by_lag"]
    dist.all_reduce(sums)
    dist.all_reduce(by_lag)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    total = dict(zip(SUMS, sums.tolist(), strict=True)) | dict(zip(MAXIMA, maxima.tolist(), strict=True))
    tokens = max(total["tokens"], 1)
    mean = {name: total[name] / tokens for name in SUMS}
    return {"policy/loss": total["loss"], "policy/clip_fraction": mean["clipped_low"] + mean["clipped_high"],
            "policy/clip_fraction_low": mean["clipped_low"], "policy/clip_fraction_high": mean["clipped_high"],
            "policy/kl_old": mean["kl_old"], "policy/kl": mean["ref_kl"], "policy/entropy": mean["entropy"],
            "policy/ratio": mean["ratio"], "policy/ratio_max": total["ratio_max"],
            "engine/gap_mean": mean["engine_gap"], "engine/gap_max": total["engine_gap_max"],
            "engine/kl": mean["engine_kl"], "engine/is_weight": mean["is_weight"], "engine/is_cut": mean["is_cut"],
            **_lag_statistics(by_lag)}


def _lag_statistics(by_lag: torch.Tensor) -> dict[str, float]:
    """Means over the tokens of each lag that has some, from the sums that BY_LAG names; {} if lags are not told apart.
    """
    columns = [dict(zip(BY_LAG, column, strict=True)) for column in by_lag.T.tolist()]
    values: dict[str, float] = {}
    for lag, one in enumerate(columns if len(columns) > 1 else []):
        if tokens := one["tokens"]:
            values |= {f"lag/{lag}/is_weight": one["is_weight"] / tokens, f"lag/{lag}/is_cut": one["is_cut"] / tokens,
                       f"lag/{lag}/clip_fraction": (one["clipped_low"] + one["clipped_high"]) / tokens}
    return values
