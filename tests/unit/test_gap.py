"""The gap between engine and trainer: sums by lag by hand, and when the alarm speaks."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.config.schema import GapAlarmConfig
from megarl.objective.gap import ROWS, gap_by_lag, gap_metrics, judge


def sums_of(gaps, lags, most=2, mask=None):
    old_t = torch.full((len(gaps),), -2.0, dtype=torch.float64)
    return gap_by_lag(old_t, old_t - torch.tensor(gaps, dtype=torch.float64), torch.tensor(lags, dtype=torch.float32),
                      torch.tensor(mask or [True] * len(gaps), dtype=torch.bool), most + 1).tolist()


def test_sums_and_metrics_by_hand():
    """Lags 0, 0, 2, 5 (counted with 2, its true lag in the mean), and a NaN that is not trained on."""
    sums = sums_of([0.5, -0.1, 0.2, -0.4, math.nan], [0, 0, 2, 5, 0], mask=[True] * 4 + [False])
    got = dict(zip(ROWS, sums, strict=True))
    assert got["tokens"] == [2, 0, 2] and got["lag"] == [0, 0, 7]
    assert got["gap"] == pytest.approx([0.6, 0, 0.6])
    kl = [math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9, 0, math.exp(0.2) - 1.2 + math.exp(-0.4) - 0.6]
    assert got["kl"] == pytest.approx(kl)
    metrics = gap_metrics(sums)
    assert metrics["lag/mean"] == 7 / 4
    assert [metrics[f"lag/{lag}/share"] for lag in range(3)] == [0.5, 0, 0.5]
    assert metrics["lag/0/gap"] == pytest.approx(0.3) and metrics["lag/2/kl"] == pytest.approx(kl[2] / 2)
    assert "lag/1/gap" not in metrics
    assert gap_metrics(sums_of([0.5], [0], most=0)) == {}  # one lag: engine/gap_mean says it


ALARM = GapAlarmConfig(threshold=0.1)


@pytest.mark.parametrize("gaps, lags, speaks", [
    ([0.05, -0.12], [0, 0], False), ([0.05, -0.16], [0, 0], True),
    ([0.15, 0.15], [1, 1], False), ([0.25, 0.25], [1, 1], True),  # a version of lag adds the threshold again
    ([0.0, 9.0], [0, 1], False),  # the newest are right: the policy has moved
    ([9.0] + [0.05] * 200, [0] + [1] * 200, False),  # one token of lag 0 says little
    ([math.nan, 0.0], [0, 0], True), ([math.inf, 0.0], [0, 0], True), ([], [], False)])
def test_alarm(gaps, lags, speaks):
    told = judge(sums_of(gaps, lags), ALARM, step=7)
    assert bool(told) == speaks
    if told:
        for part in ("step 7", f"lag {min(lags)}", "publish", "dtype", "temperature"):
            assert part in told
    assert judge(sums_of(gaps, lags), GapAlarmConfig(action="off"), step=7) is None


def test_the_message_names_the_value():
    assert "gap| 0.25 over 2 tokens of lag 1, above 0.2" in judge(sums_of([0.25, -0.25], [1, 1]), ALARM, step=7)
