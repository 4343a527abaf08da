"""The alarm for leaps of loss and gradient norm."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.config.schema import GuardConfig
from megarl.errors import MachineFault
from megarl.update.guard import DUMPS, Guard


def steps(guard: Guard, values: list[float], name: str = "optim/grad_norm") -> list[int]:
    """Numbers of the steps at which it sounds."""
    return [number for number, value in enumerate(values) if guard.judge(number, {name: value})]


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
    assert steps(second, values[40:]) == [20] and list(first.state()) == ["optim/grad_norm"]


def test_what_follows():
    guard = Guard(GuardConfig())
    guard.raise_if_asked("loss is 7", "run/guard")
    assert [guard.wants_dump() for _ in range(DUMPS + 1)] == [True] * DUMPS + [False]
    with pytest.raises(MachineFault, match="loss is 7; its samples are in run/guard"):
        Guard(GuardConfig(action="stop")).raise_if_asked("loss is 7", "run/guard")
    Guard(GuardConfig(action="stop")).raise_if_asked("", "")


def test_a_trainer_tells_keeps_the_samples_and_stops(tmp_path):
    """The wiring: a leap is told, the step's samples are written for a replay, and the run ends if asked to."""
    from types import SimpleNamespace

    import numpy as np

    from megarl.data.dump import read_parts
    from megarl.data.ragged import SampleBatch
    from megarl.data.sample import Group, Prompt, Sample
    from megarl.trainer import Trainer

    prompt = Prompt(4, 0, 4, "s", np.array([1, 2], np.int32))
    sample = Sample(prompt, 0, 1, np.array([3], np.int32), np.array([-1.0], np.float32), "stop", reward=1.0)
    said = []
    trainer = SimpleNamespace(
        guard=Guard(GuardConfig(action="stop")), run_dir=tmp_path, version="g:30",
        report=SimpleNamespace(say=said.append),
        progress=SimpleNamespace(step=30), groups=SimpleNamespace(dp=0, layout=SimpleNamespace(data=1)),
        taken=SimpleNamespace(local=SampleBatch.from_groups([Group(prompt, [sample])]), position=5, unfinished=(),
                              metrics={}))
    trainer._keep_samples = lambda: Trainer._keep_samples(trainer)
    for number in range(20):
        Trainer._guard(trainer, {"optim/grad_norm": 1 + 0.01 * (number % 3), "policy/loss": 0.0, "policy/kl_old": 0.0})
    assert not said
    with pytest.raises(MachineFault, match="optim/grad_norm is 40"):
        Trainer._guard(trainer, {"optim/grad_norm": 40.0, "policy/loss": 0.0, "policy/kl_old": 0.0})
    assert said == ["warning: step 31: optim/grad_norm is 40, the median of the last 20 optimizer steps is 1.01 "
                    f"(guard.spike is 10); the step's samples are in {tmp_path / 'guard'}"]
    (part,) = read_parts(tmp_path / "guard", 31, 0, 1)
    assert part.samples.position.tolist() == [4]


def test_what_is_0_but_for_rounding_is_no_spike():
    guard = Guard(GuardConfig())
    for step in range(20):
        assert not guard.judge(step, {"policy/kl_old": 0.0, "policy/loss": 1e-9})
    assert not guard.judge(20, {"policy/kl_old": 1e-6, "policy/loss": 1e-3})
    assert "policy/kl_old" in guard.judge(21, {"policy/kl_old": 0.5})


# of second updates of a healthy run of configs/quickstart.yaml; those of first updates are 0
KL_OLD = (
    3.7e-04, 1.8e-03, 3.7e-03, 3.0e-03, 2.4e-03, 1.6e-03, 3.1e-03, 1.4e-03, 1.1e-03, 2.1e-03, 1.9e-03, 2.1e-03,
    7.8e-04, 1.9e-04, 2.8e-04, 9.4e-04, 6.9e-04, 6.5e-04, 1.2e-03, 1.9e-02, 1.8e-04, 3.1e-04, 4.2e-05, 4.1e-04,
    1.4e-03, 1.4e-04, 2.2e-04, 2.9e-04, 3.0e-02, 3.9e-03, 1.4e-04, 4.2e-05, 2.9e-04, 5.6e-04, 1.6e-03, 1.0e-02,
    1.7e-04, 4.5e-05, 5.2e-04, 3.3e-04, 3.0e-06, 1.4e-04, 2.3e-04, 2.9e-03, 1.1e-04, 9.1e-05, 9.4e-05, 7.4e-04,
    9.3e-05, 1.8e-06, 2.3e-03, 9.5e-05, 1.9e-04, 1.5e-03, 4.9e-04, 2.0e-04, 5.2e-04, 7.1e-03, 1.4e-03, 2.1e-04)


def several(guard: Guard, steps: list[list[float]]) -> list[str]:
    """What is told of the KL of some updates a step."""
    return [told for step, values in enumerate(steps) for value in values
            if (told := guard.judge(step, {"policy/kl_old": value}))]


def test_later_updates_of_a_step_are_compared_with_their_like():
    """A policy has not moved at a step's first update: its KL is no measure for the second's."""
    healthy = [[0.0, value] for value in KL_OLD]
    assert several(Guard(GuardConfig()), healthy) == []
    assert several(Guard(GuardConfig()), [[0.0, 0.06 + 0.002 * (step % 5)] for step in range(40)]) == []


def test_a_leap_of_a_later_update_is_told():
    told = several(Guard(GuardConfig()), [*([0.0, value] for value in KL_OLD), [0.0, 0.5]])
    assert told == ["policy/kl_old is 0.5, the median of update 2 of the last 50 steps is 0.00032 (guard.spike is 10)"]
    first = several(Guard(GuardConfig()), [*([0.0, 0.2] for _ in range(20)), [0.3, 0.2]])
    assert len(first) == 1 and first[0].startswith("policy/kl_old is 0.3, the median of update 1 of the last 20 ")


def test_a_new_level_of_a_later_update_is_got_used_to():
    """The first updates between its alarms have none."""
    steps = [[0.0, 0.01]] * 30 + [[0.0, 0.5]] * 60
    assert len(several(Guard(GuardConfig(window=20)), steps)) == 11


def test_a_state_of_before_places_starts_afresh():
    guard = Guard(GuardConfig())
    guard.resume({"optim/grad_norm": [1.0] * 20, "policy/loss": [0.0] * 20, "policy/kl_old": [0.0] * 20})
    assert guard.judge(20, {"policy/kl_old": 0.06}) == ""
    assert guard.judge(21, {"optim/grad_norm": 40.0})
    assert sorted(guard.state()) == ["optim/grad_norm", "policy/kl_old@0", "policy/loss"]
