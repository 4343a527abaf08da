"""Sampling that goes on while the trainers train: every sample is trained on once, by weights not too far ahead."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from good_config import good_tree, write_files
from test_train import launch_tree, metrics, start_tree

from megarl.data.sample import version_number

STEPS, PROMPTS, SAMPLES, LAG = 6, 8, 16, 2


def tree(folder: Path, run: str, on_update: str, overlap: bool = False) -> dict[str, Any]:
    """Answers of 1 to 48 tokens, in so few slots that publishes find them half done."""
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / run), "steps": STEPS, "seed": 5}
    tree["data"] |= {"prompts_per_step": PROMPTS}
    tree["rollout"] |= {"samples_per_prompt": SAMPLES, "max_response_tokens": 48, "slots": 4, "max_lag": LAG,
                        "on_update": on_update}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 8, "hard": 48}}], "workers": 1}
    tree["batch"] = {"minibatches": 2, "max_tokens": 1024}
    tree["optim"] = {"lr": 3e-3, "warmup_steps": 2}
    tree["sync"] = {"overlap": overlap}
    tree["checkpoint"] = {"every": 2, "keep": 3, "export": False}
    tree["observe"], tree["eval"] = {"rollouts": 1}, {"before_start": False}
    return tree


def samples(folder: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / run / "rollouts").glob("step_*"))
            for line in path.read_text().splitlines()]


def check(found: list[dict[str, Any]]) -> None:
    """Each sample of the run's prompts once, whole, and sampled by weights that were not too old."""
    assert Counter((line["position"], line["n"]) for line in found) == Counter(
        (position, n) for position in range(STEPS * PROMPTS) for n in range(SAMPLES))
    for line in found:
        edges = [0] + [end for _, _, end in line["versions"]]
        assert [start for _, start, _ in line["versions"]] == edges[:-1] and edges[-1] == len(line["response_ids"])
        numbers = [version_number(version) for version, _, _ in line["versions"]]
        assert numbers == sorted(set(numbers)) and line["step"] - 1 - LAG <= numbers[0] <= numbers[-1] < line["step"]


@pytest.mark.parametrize("on_update, overlap", [("retract", True), ("abort", False)])
def test_nothing_is_lost_old_or_trained_twice_also_over_a_resume(tmp_path: Path, on_update: str, overlap: bool):
    write_files(tmp_path)
    launch_tree(tmp_path, tree(tmp_path, "run", on_update, overlap))
    found, steps = samples(tmp_path, "run"), metrics(tmp_path, "run")
    check(found)
    assert sum(len(line["versions"]) > 1 for line in found) > 2  # new weights came in the middle of an answer
    assert (sum(step["rollout/resumed"] for step in steps) > 0) == (on_update == "abort")
    assert steps[-1]["rollout/ahead_groups"] == 0 and max(step["rollout/ahead_groups"] for step in steps) > 0
    for step in steps:  # the trainer's weights are those of lag 0; after a swap the engine computes the prefix anew
        assert step.get("lag/0/gap", 0) < 1e-6 and step["policy/kl_old"] > 1e-6
    assert max(step.get("lag/1/gap", 0) for step in steps) > 1e-4
    assert sum(step.get("lag/1/share", 0) + step.get("lag/2/share", 0) for step in steps) > 0.5

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")  # as if killed in the last steps
    for path in (tmp_path / "run" / "rollouts").glob("step_000[56].*"):
        path.unlink()
    assert "step 6/6" in launch_tree(tmp_path, tree(tmp_path, "run", on_update, overlap))
    check(samples(tmp_path, "run"))


def test_a_request_to_stop_ends_the_run_in_order_and_it_goes_on(tmp_path: Path):
    write_files(tmp_path)
    tree_ = tree(tmp_path, "run", "retract")
    (tmp_path / "run").mkdir()
    process = start_tree(tmp_path, tree_)
    lines = tmp_path / "run" / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    (tmp_path / "run" / "STOP").touch()
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    done = len(metrics(tmp_path, "run"))
    assert 0 < done < STEPS and f"stopped on request after step {done} of {STEPS}" in told
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["message"] == "stopped on request"
    assert not (tmp_path / "run" / "STOP").exists()
    assert json.loads((tmp_path / "run" / "heartbeat.json").read_text())["step"] == done
    assert f"step {STEPS}/{STEPS}" in launch_tree(tmp_path, tree_)
    check(samples(tmp_path, "run"))
