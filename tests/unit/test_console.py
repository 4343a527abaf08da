"""The console's line and the picture say what there is, and nothing of what there is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import numpy as np
import pytest

from megarl.data.buffer import ExperienceBuffer
from megarl.data.sample import Group, Prompt, Sample
from megarl.observe.console import step_line
from megarl.observe.curve import draw_reward

VALUES = {"reward/mean": 0.5, "policy/kl": 0.0, "optim/grad_norm": 0.0, "rollout/signal": 0.0}


def test_no_kl_without_a_reference():
    assert step_line(1, 2, VALUES, reference=False).endswith(" reward 0.500 |g| 0.00 no signal")
    assert step_line(1, 2, VALUES, reference=True).endswith(" reward 0.500 kl 0.0e+00 |g| 0.00 no signal")


def test_a_gradient_has_a_signal_or_an_explanation():
    assert step_line(1, 2, VALUES | {"rollout/signal": 0.1}, reference=False).endswith("|g| 0.00")
    assert step_line(1, 2, {"optim/grad_norm": 0.0}, reference=False).endswith("|g| 0.00")  # not known


def group(*rewards: float | None) -> Group:
    prompt = Prompt(0, 0, 0, "s", np.array([1], np.int32))
    return Group(prompt, [Sample(prompt, n, 1, np.array([3], np.int32), np.array([-1.0], np.float32), "stop",
                                 reward=reward) for n, reward in enumerate(rewards)])


@pytest.mark.parametrize(("groups", "filtered", "share"), [
    ([group(1.0, 1.0), group(0.0, 0.0)], [], 0.0),  # rewards differ, within no group
    ([group(1.0, 0.0), group(0.0, 0.0)], [], 0.5),
    ([group(1.0, 0.0)], [group(0.0, 0.0), group(1.0, None), group(1.0, 1.0)], 0.25),
    ([], [], 0.0)])
def test_the_share_of_groups_with_a_signal(monkeypatch: pytest.MonkeyPatch, groups: list[Group],
                                           filtered: list[Group], share: float):
    monkeypatch.setattr("megarl.data.buffer.sum_named", lambda sums, over: sums)
    buffer = ExperienceBuffer(None, lambda step: None, SimpleNamespace(leaders=None), [], 0)
    measured = buffer._measure(SimpleNamespace(groups=groups, filtered=filtered, counts={}, reports=[]))
    assert measured["rollout/signal"] == share


def test_the_picture_names_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A held-out set may be answered greedily: no curve is said to be of sampled answers."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(
        {"step": step, "reward/mean": 0.5, "eval/heldout_greedy/reward": 0.6}) + "\n" for step in range(3)))
    drawn: list[Any] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path, **_: drawn.append(
        (figure.axes[0].get_ylabel(), [text.get_text() for text in figure.axes[0].get_legend().get_texts()])))
    draw_reward(tmp_path)
    assert drawn == [("mean reward", ["training samples", "evaluation: heldout_greedy"])]
