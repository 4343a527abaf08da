"""Runs that go on under other conditions than they began: smaller limits, and the first weights gone."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from good_config import good_tree, write_files
from test_train import launch_tree, metrics

from megarl.checkpoint.convert import to_megatron
from megarl.checkpoint.team import Team
from megarl.data.groups_file import read_positions
from megarl.data.sample import version_number

STEPS, PROMPTS, SAMPLES, DONE = 5, 8, 4, 3


def tree(folder: Path) -> dict[str, Any]:
    """Short answers, sampled two steps ahead; it begins with weights beside the model's directory."""
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / "run"), "steps": STEPS, "seed": 5}
    tree["model"]["weights"] = str(folder / "converted")
    tree["data"] |= {"prompts_per_step": PROMPTS}
    tree["rollout"] |= {"samples_per_prompt": SAMPLES, "max_lag": 2}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 2, "hard": 8}}], "workers": 1}
    tree["optim"] = {"lr": 3e-3}
    tree["checkpoint"] = {"every": 1, "keep": STEPS, "export": False}
    tree["observe"], tree["eval"] = {"rollouts": 1, "tensorboard": False}, {}
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as if killed two steps before its end, in the middle of what a damaged checkpoint says."""
    place = tmp_path_factory.mktemp("resume")
    write_files(place)
    to_megatron(place / "model", place / "converted", Team())
    launch_tree(place, tree(place), f"debug.dump_experience={place / 'experience'}")
    checkpoints = place / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000005")
    (checkpoints / "step_00000004" / "common.pt").write_bytes(b"cut")
    shutil.copytree(place / "run", place / "kept")
    return place


def restore(folder: Path) -> None:
    """The run as the fixture left it."""
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "kept", folder / "run")


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / "run" / "rollouts").glob("step_*"))
            for line in path.read_text().splitlines()]


def test_held_groups_that_smaller_limits_do_not_allow_are_sampled_again(folder: Path):
    """With max_lag 0 and half the prompts a step; nothing is lost, and the run does not need its first weights."""
    restore(folder)
    held: dict[int, int] = {}
    for path in (folder / "run" / "checkpoints" / f"step_{DONE:08d}").glob("held.*.safetensors"):
        held |= read_positions(path)
    (folder / "converted").rename(folder / "gone")
    try:
        told = launch_tree(folder, tree(folder), "checkpoint.allow_changes=true", "rollout.max_lag=0",
                           f"data.prompts_per_step={PROMPTS // 2}", "run.steps=7")
    finally:
        (folder / "gone").rename(folder / "converted")
    assert "step_00000004 is damaged" in told and "resumed: " in told.replace("resumed  ", "resumed: ")
    dropped, of = map(int, re.search(r"warning: (\d+) of the (\d+) groups that were sampled ahead are dropped",
                                     told).groups())
    assert 0 < dropped <= of == len(held)
    found = samples(folder)
    assert Counter((line["position"], line["n"]) for line in found) == Counter(
        (position, n) for position in range(DONE * PROMPTS + 4 * PROMPTS // 2) for n in range(SAMPLES))
    later = [line for line in found if line["step"] > DONE]
    assert all(version_number(version) == line["step"] - 1 for line in later for version, _, _ in line["versions"])
    assert set(held.values()) <= {line["position"] for line in later}


def test_trainers_alone_go_on_without_any_first_weights(folder: Path):
    """Replaying what the run sampled, they learn after the resume what it learned."""
    config = tree(folder) | {"debug": {"replay_experience": str(folder / "experience")}}
    config["run"] |= {"dir": str(folder / "alone"), "steps": 2}
    config["cluster"] |= {"rollouts": 0}
    launch_tree(folder, config)
    gone = [folder / "converted", *(folder / "model").glob("*.safetensors")]
    for path in gone:
        path.rename(path.with_name(f"{path.name}.gone"))
    try:
        launch_tree(folder, config, "run.steps=4")
    finally:
        for path in gone:
            path.with_name(f"{path.name}.gone").rename(path)
    whole, alone = ([step for step in metrics(folder, run) if step["step"]] for run in ("kept", "alone"))
    assert [step["step"] for step in alone] == [1, 2, 3, 4]
    for one, other in zip(alone, whole, strict=False):
        for name in ("policy/loss", "optim/grad_norm", "policy/entropy", "engine/gap_mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), (one["step"], name)
    assert whole[3]["policy/entropy"] != pytest.approx(whole[0]["policy/entropy"], rel=1e-4)
