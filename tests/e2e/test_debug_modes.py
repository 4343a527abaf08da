"""Half a run at a time: what one run sampled is trained on again without engines, and sampled without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from good_config import good_tree, write_files
from test_train import launch_tree, start_tree

from megarl.data.dump import read_parts

STEPS = 2
# what training made of the samples; times and memory are of their run
TRAINED = ("policy/", "engine/", "optim/", "moe/", "reward/", "tokens/", "lag/", "packing/")


def tree(folder: Path, run: str, trainers: int = 1, **debug: Any) -> dict[str, Any]:
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / run), "steps": STEPS, "seed": 5}
    tree["cluster"] |= {"trainers": trainers, "rollouts": 0 if "replay_experience" in debug else 1}
    tree["parallel"] = {"expert": trainers}
    tree["data"] |= {"prompts_per_step": 8}
    tree["rollout"] |= {"max_lag": 1}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 2, "hard": 8}}], "workers": 1}
    tree["optim"] = {"lr": 3e-3}
    tree["checkpoint"] = {"every": 0, "export": False}
    tree["observe"] = {"tensorboard": False}
    tree["debug"] = debug
    return tree


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in one.items() if name.startswith(TRAINED)} for one in records if one["step"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replay")
    write_files(place)
    launch_tree(place, tree(place, "whole", dump_experience=str(place / "experience")))
    return place


def test_replay_without_engines_equals_the_run_to_the_bit(folder: Path):
    launch_tree(folder, tree(folder, "again", replay_experience=str(folder / "experience")))
    whole, again = metrics(folder, "whole"), metrics(folder, "again")
    assert len(whole) == STEPS and "policy/loss" in whole[0] and whole[1]["lag/mean"] > 0
    assert again == whole


def test_lags_are_those_of_the_samples(folder: Path):
    """Version 1 trains in step 2; its samples say which version made each token."""
    versions = read_parts(folder / "experience", 2, 0, 1)[0].samples.versions
    told = metrics(folder, "whole")[1]
    assert set(versions) <= {0, 1} and 0 in versions
    assert told["lag/mean"] == told["lag/1/share"] == pytest.approx((versions == 0).mean())
    assert told["lag/0/share"] == pytest.approx((versions == 1).mean())
    assert ("lag/0/gap" in told) == (1 in versions) == ("lag/0/is_weight" in told)


def test_replay_on_another_layout_equals_it_to_rounding(folder: Path):
    """Two trainers that share the experts and the data train on what one has sampled."""
    told = launch_tree(folder, tree(folder, "two", 2, replay_experience=str(folder / "experience")),
                       "data.shuffle=false", "objective.gap_alarm.threshold=1e-12")
    assert "was sampled with data.shuffle True, now it is False" in told and "nothing is evaluated" in told
    assert "warning: step 1: engine and trainer disagree: mean |log-prob gap|" in told
    for two, whole in zip(metrics(folder, "two"), metrics(folder, "whole"), strict=True):
        assert {name for name in two if name.startswith("lag/")} == {name for name in whole if name.startswith("lag/")}
        for name in ("policy/loss", "optim/grad_norm", "policy/entropy", "engine/gap_mean", "reward/mean",
                     "moe/balance_loss", *(name for name in whole if name.startswith("lag/"))):
            assert two[name] == pytest.approx(whole[name], rel=2e-4, abs=2e-6), name


def test_the_alarm_ends_a_run_before_it_learns(folder: Path):
    process = start_tree(folder, tree(folder, "alarmed", replay_experience=str(folder / "experience")),
                         "objective.gap_alarm={threshold: 1e-12, action: stop}")
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 64
    assert "objective.gap_alarm: step 1: engine and trainer disagree" in told and "likely causes" in told.lower()
    assert not metrics(folder, "alarmed") and not list((folder / "alarmed" / "checkpoints").glob("step_*"))


def test_sampling_alone(folder: Path):
    launch_tree(folder, tree(folder, "sampled", rollout_only=True, dump_experience=str(folder / "alone")))
    assert not (folder / "sampled" / "checkpoints").exists()
    assert [set(one) & {"reward/mean", "policy/loss"} for one in metrics(folder, "sampled")] == [{"reward/mean"}] * 2
    for step in range(1, STEPS + 1):
        (part,) = read_parts(folder / "alone", step, 0, 1)
        assert len(part.samples) == 32 and part.version.endswith(f":{step - 1}")
    # both first steps are by version 0, with the same seeds
    first, whole = (read_parts(folder / name, 1, 0, 1)[0].samples for name in ("alone", "experience"))
    common = set(first.position) & set(whole.position)
    assert common
    ours, theirs = (one.select(np.flatnonzero(np.isin(one.position, list(common)))) for one in (first, whole))
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.rewards.tolist() == theirs.rewards.tolist()
