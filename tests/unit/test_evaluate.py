"""Metrics of an evaluation, avg@k and pass@k, against values worked out by hand and by enumeration."""

import itertools
import math

import numpy as np
import pytest

from megarl.config.schema import EvalSetConfig
from megarl.data.sample import Group, Prompt, Sample
from megarl.rollout.evaluate import averages, pass_at_k, sums


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


def evaluated(rewards, pass_at=(), success=1.0, samples=4, leaders=2):
    """The metrics of these rewards per prompt, dealt over leaders; response n of a prompt has n + 1 tokens, an odd n is
    truncated."""
    prompt = Prompt(0, 0, 0, "s", np.array([5], np.int32))
    groups = [Group(prompt, [Sample(prompt, n, 0, np.zeros(n + 1, np.int32), np.zeros(n + 1, np.float32),
                                    "length" if n % 2 else "stop", reward=reward) for n, reward in enumerate(row)])
              for row in rewards]
    chosen = EvalSetConfig(path="x", pass_at=list(pass_at), success=success, sampling={"samples": samples})
    parts = [sums(groups[leader::leaders], chosen) for leader in range(leaders)]
    return averages({name: sum(part[name] for part in parts) for name in parts[0]}, chosen, len(rewards) + 1)


def test_metrics():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.5], [0.0, None, None, None], [None] * 4]
    assert evaluated(rewards, [1, 2]) == pytest.approx({
        "reward": (1 / 4 + 3 / 4 + 0) / 3, "response_tokens": 2.5, "truncated": 0.5,
        "unscored": 7, "unanswered": 1,
        "pass@1": (1 / 4 + 1 / 2 + 0) / 3,
        "pass@2": (1 / 2 + 5 / 6) / 2})  # the third prompt has one reward only
    assert evaluated(rewards, [2], success=0.5)["pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert math.isnan(evaluated([[None]], [1], samples=1)["pass@1"]) and math.isnan(evaluated([[None]])["reward"])
