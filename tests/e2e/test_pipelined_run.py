"""A run whose stages lie in a V: schedules chosen by measured costs, routing replayed, an exact resume, a timeline, an
export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from good_config import good_tree, write_files
from test_train import launch_tree, metrics

from megarl.pipeline import trace


def tree(folder: Path, run: str) -> dict[str, Any]:
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / run), "steps": 4, "seed": 5}
    tree["parallel"] = {"pipeline": 2, "layers_per_stage": [1, 2, 2, 1]}
    tree["pipeline"] = {"schedule": "auto"}
    tree["data"] |= {"prompts_per_step": 16}
    tree["rollout"] |= {"max_response_tokens": 16, "slots": 64}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 4, "hard": 16}}], "workers": 1}
    tree["objective"] = {"algorithm": "gspo", "kl": {"coefficient": 0.01, "estimator": "k2", "place": "reward"}}
    tree["batch"] = {"minibatches": 2, "max_tokens": 96}
    tree["optim"] = {"lr": 3e-3}
    tree["moe"] = {"replay": "engine"}
    tree["sync"] = {"verify": True}
    tree["checkpoint"] = {"every": 2}
    tree["eval"] = {"before_start": False}
    tree["observe"] = {"trace_steps": [3]}
    return tree


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("pipelined")
    write_files(folder, layers=6)
    return folder, launch_tree(folder, tree(folder, "whole"))


def test_schedules_are_chosen_and_told(told: tuple[Path, str]):
    folder, text = told
    assert "PP2 v" in text
    steps = metrics(folder, "whole")
    for step in steps:
        assert step["engine/gap_max"] < 1e-5 and 0 < step["pipeline/bubble"] < 0.5
        assert 0 <= step["moe/routing_disagreement"] < 1e-3 and 0.5 < step["moe/load_entropy"] <= 1
        ran = {name for name in step if name.startswith("pipeline/") and name != "pipeline/bubble"}
        assert ran <= {"pipeline/zb-v", "pipeline/dualpipev"} and sum(step[name] for name in ran) == 2
    assert steps[0]["pipeline/zb-v"] == 2  # warm-up
    assert steps[3]["policy/kl"] > 0 and steps[3]["policy/kl_old"] > 1e-6


def test_the_timeline_is_the_schedule(told: tuple[Path, str]):
    files = sorted((told[0] / "whole" / "traces").iterdir())
    assert [file.name for file in files] == ["step_00000003_update_5.jsonl", "step_00000003_update_6.jsonl"]
    for file in files:
        line = trace.read(file)
        assert line.schedule.placement == ((0,), (1,), (1,), (0,))
        assert 0 < line.makespan < 60 and all(0 < bubble < 1 for bubble in line.bubble)


def test_resume_equals_the_uninterrupted_run(told: tuple[Path, str]):
    """With the costs that were measured before, not with new ones."""
    from safetensors.torch import load_file

    folder = told[0]
    shutil.copytree(folder / "whole", folder / "parts")
    shutil.rmtree(folder / "parts" / "checkpoints" / "step_00000004")
    shutil.rmtree(folder / "parts" / "export")
    launch_tree(folder, tree(folder, "parts"))
    for one, other in zip(metrics(folder, "whole"), metrics(folder, "parts"), strict=True):
        names = [name for name in one if name.startswith(("pipeline/", "policy/", "moe/", "optim/"))]
        assert len(names) > 20 and {name: one[name] for name in names} == {name: other[name] for name in names}
    ours, theirs = ({name: tensor for path in sorted((folder / run / "export").glob("*.safetensors"))
                     for name, tensor in load_file(path).items()} for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_export_is_the_model(told: tuple[Path, str]):
    """Published weights were verified tensor by tensor at each step (sync.verify); the export has them all."""
    from transformers import AutoModelForCausalLM

    export = told[0] / "whole" / "export"
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.num_hidden_layers == 6
    assert len(json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]) > 100
