"""avg@k and pass@k against values worked out by hand and by enumeration."""

import itertools
import math

import pytest

from megarl.observe.passk import pass_at_k, summarize


@pytest.mark.parametrize("samples, correct, k, expected", [
    (1, 1, 1, 1.0), (1, 0, 1, 0.0), (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 2, 3, 1.0),
    (4, 0, 4, 0.0), (10, 3, 5, 11 / 12)])  # 1 - C(7,5)/C(10,5) = 1 - 21/252
def test_by_hand(samples, correct, k, expected):
    assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


def test_by_enumeration():
    for samples, correct in ((5, 0), (5, 2), (6, 3), (6, 6)):
        for k in range(1, samples + 1):
            draws = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_no_overflow():
    assert pass_at_k(5000, 1, 2500) == 0.5


@pytest.mark.parametrize("samples, correct, k", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_refused(samples, correct, k):
    with pytest.raises(ValueError):
        pass_at_k(samples, correct, k)


def test_summary():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.5], [0.0, None, None, None], [None] * 4]
    metrics = summarize(rewards, [1, 2], success=1.0)
    assert metrics == pytest.approx({
        "avg@4": (1 / 4 + 3 / 4 + 0) / 3,
        "pass@1": (1 / 4 + 1 / 2 + 0) / 3,
        "pass@2": (1 / 2 + 5 / 6) / 2,  # the third prompt has one reward only
        "unscored": 7.0})
    assert summarize(rewards, [2], success=0.5)["pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert summarize([[0.25], [0.75]]) == {"avg@1": 0.5, "unscored": 0.0}
    assert math.isnan(summarize([[None]], [1])["pass@1"])
