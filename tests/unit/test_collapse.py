"""The alarm for collapsed loads: when it sounds, what it does, what a resumed run remembers."""

import pytest

from megarl.config.schema import CollapseConfig
from megarl.errors import UserMistake
from megarl.update.collapse import CollapseAlarm

EVEN, LOW = {0: 0.98, 1: 0.9}, {0: 0.98, 1: 0.31}


def alarm(action, steps=2, **more):
    return CollapseAlarm(CollapseConfig(entropy=0.5, steps=steps, action=action, **more))


def test_only_steps_in_a_row_count():
    one = alarm("warn")
    assert [bool(one.judge(loads)) for loads in (LOW, EVEN, LOW, LOW, LOW, LOW)] == [0, 0, 0, 1, 0, 1]
    assert one.judge(LOW) == "" and one.judge(LOW) == (
        "1 layer with uneven load for 2 optimizer steps, the worst 1 with entropy 0.310 below 0.5")
    assert (one.factor, one.frozen) == (1.0, False)
    assert not any(alarm("warn", steps=1).judge(loads) for loads in (EVEN, {0: 0.5}, {}))  # the bound itself is fine
    assert "2 layers" in alarm("warn", steps=1).judge({0: 0.1, 1: 0.2, 5: 0.9})


def test_raise():
    one = alarm("raise", steps=1, factor=3.0)
    assert "3 times" in one.judge(LOW) and one.factor == 3.0
    assert one.judge(EVEN) == "" and one.factor == 3.0
    assert "9 times" in one.judge(LOW) and not one.frozen


def test_freeze():
    one = alarm("freeze", steps=1)
    assert one.judge(LOW).endswith("the routers are frozen now") and one.frozen and one.factor == 1.0
    assert one.judge(LOW).endswith("although the routers are frozen")


def test_stop():
    one = alarm("stop")
    assert one.judge(LOW) == ""
    with pytest.raises(UserMistake, match="entropy 0.310") as caught:
        one.judge(LOW)
    assert caught.value.where == "moe.collapse"


def test_a_resumed_run_remembers():
    one = alarm("raise", factor=2.0)
    for _ in range(3):
        one.judge(LOW)
    again = alarm("raise", factor=2.0)
    again.resume(one.state())
    assert (again.low, again.factor) == (1, 2.0) and "4 times" in again.judge(LOW)
    other = alarm("warn")  # the action was changed: what it did is undone, what it counted is not
    other.resume(one.state())
    assert (other.low, other.factor, other.frozen) == (1, 1.0, False)
    frozen = alarm("freeze")
    frozen.resume({"low": 0, "factor": 2.0, "frozen": 1.0})
    assert frozen.frozen and frozen.factor == 1.0
    frozen.resume({})
    assert frozen.frozen
