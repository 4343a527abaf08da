"""The alarm for leaps of loss and gradient norm."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.config.schema import GuardConfig
from megarl.errors import MachineFault
from megarl.update.guard import DUMPS, Guard


def steps(guard: Guard, values: list[float], name: str = "optim/grad_norm") -> list[int]:
    """Numbers of the steps at which it sounds."""
    return [number for number, value in enumerate(values) if guard.judge({name: value})]


def noise(count: int, seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).lognormal(0.0, 0.3, count))


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed: int):
    assert steps(Guard(GuardConfig()), noise(2000, seed)) == []


@pytest.mark.parametrize("name", ["optim/grad_norm", "policy/loss", "policy/kl_old"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_leap_is_one(name: str, sign: int):
    values = noise(200)
    values[60] = values[150] = 30.0
    assert steps(Guard(GuardConfig()), [sign * value for value in values], name) == [60, 150]


def test_the_bound_is_median_and_mad():
    """By an independent calculation; and never below twice the largest."""
    values = [1.0] * 10 + [1.2] * 10
    assert max(1.1 + 10 * 1.4826 * 0.1, 2 * 1.2) == pytest.approx(2.5826)  # median 1.1, every deviation is 0.1
    assert steps(Guard(GuardConfig(spike=10.0, window=20)), [*values, 2.58]) == []
    assert steps(Guard(GuardConfig(spike=10.0, window=20)), [*values, 2.59]) == [20]
    assert steps(Guard(GuardConfig(window=20)), [1.0] * 20 + [1.99]) == []
    assert steps(Guard(GuardConfig(window=20)), [1.0] * 20 + [2.01]) == [20]


def test_first_steps_are_not_judged():
    assert steps(Guard(GuardConfig()), [1.0] * 9 + [50.0]) == []
    assert steps(Guard(GuardConfig()), [1.0] * 10 + [50.0]) == [10]


def test_a_new_level_is_got_used_to():
    """After half a window of alarms; and a spike of its own does not make the next one normal."""
    values = noise(100) + [40 * value for value in noise(100, 1)]
    heard = steps(Guard(GuardConfig(window=20)), values)
    assert heard == list(range(100, 111))
    twice = noise(50) + [30.0, 30.0, 30.0]
    assert steps(Guard(GuardConfig()), twice) == [50, 51, 52]


def test_off():
    assert steps(Guard(GuardConfig(spike=0.0)), noise(50) + [1e9]) == []


def test_a_resumed_run_judges_alike():
    values = noise(60) + [30.0]
    first, second = Guard(GuardConfig()), Guard(GuardConfig())
    assert steps(first, values[:40]) == []
    second.resume(first.state())
    second.resume({})
    assert steps(second, values[40:]) == [20] and first.state()["policy/loss"] == []


def test_what_follows():
    guard = Guard(GuardConfig())
    guard.raise_if_asked("loss is 7", "run/guard")
    assert [guard.wants_dump() for _ in range(DUMPS + 1)] == [True] * DUMPS + [False]
    with pytest.raises(MachineFault, match="loss is 7; its samples are in run/guard"):
        Guard(GuardConfig(action="stop")).raise_if_asked("loss is 7", "run/guard")
    Guard(GuardConfig(action="stop")).raise_if_asked("", "")
