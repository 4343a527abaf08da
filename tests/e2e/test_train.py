"""The real loop through the real launcher: two trainers, one rollout rank, a random tiny MoE."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from good_config import good_tree, write_files, write_tree

ROOT = Path(__file__).resolve().parent.parent.parent


def tree(folder: Path, run: str) -> dict[str, Any]:
    """A run whose first step samples more than 10,000 tokens in groups of 8."""
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / run), "steps": 4, "seed": 5}
    tree["data"] |= {"prompts_per_step": 48}
    tree["rollout"] |= {"samples_per_prompt": 8, "max_response_tokens": 48, "slots": 64}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 8, "hard": 48}}], "workers": 1}
    tree["objective"] = {"algorithm": "gspo", "kl": {"coefficient": 0.01, "estimator": "k2", "place": "reward"}}
    tree["batch"] = {"minibatches": 2, "max_tokens": 1024}
    tree["optim"] = {"lr": 3e-3, "warmup_steps": 2}
    tree["sync"] = {"verify": True}
    tree["checkpoint"] = {"every": 2}
    tree["eval"] = {"every": 2, "sets": [
        {"path": str(folder / "heldout.jsonl"), "name": "sampled", "sampling": {"samples": 4}, "pass_at": [1, 4]},
        {"path": str(folder / "heldout.jsonl"), "name": "greedy", "sampling": {"temperature": 0.0}}]}
    tree["observe"] = {"rollouts": 2}
    return tree


def launch(folder: Path, run: str, *overrides: str) -> str:
    return launch_tree(folder, tree(folder, run), *overrides)


def launch_tree(folder: Path, config: dict[str, Any], *overrides: str) -> str:
    """Run a config to its end; what it printed."""
    process = start_tree(folder, config, *overrides)
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return told


def start_tree(folder: Path, config: dict[str, Any], *overrides: str) -> subprocess.Popen[str]:
    """Start a run of a config."""
    path = write_tree(folder, config)
    return subprocess.Popen(["bash", str(ROOT / "launch" / "torchrun.sh"), str(path), *overrides], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"})


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("train")
    write_files(place)
    launch(place, "whole")
    return place


def test_engine_and_trainer_agree(folder: Path):
    steps = metrics(folder, "whole")
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert steps[1]["tokens/response"] > 10_000
    for step in steps[1:]:
        assert 0 < step["engine/gap_max"] < 1e-5 and step["engine/gap_mean"] < 1e-6
        assert step["policy/kl_old"] > 1e-6  # the weights move, so an engine left behind would show
    assert steps[4]["policy/kl"] > 1e-3  # against the reference, which stays


def test_resume_equals_the_uninterrupted_run(folder: Path):
    """From what a run leaves that is killed after its last step, before the checkpoint of it."""
    from safetensors.torch import load_file

    shutil.copytree(folder / "whole", folder / "parts")
    shutil.rmtree(folder / "parts" / "checkpoints" / "step_00000004")
    shutil.rmtree(folder / "parts" / "export")
    told = launch(folder, "parts", "checkpoint.keep=3")
    assert "step_00000002: checkpoint.keep was 2, is 3\n" in told and "step 3/4" in told and "step 2/4" not in told
    whole, parts = metrics(folder, "whole"), metrics(folder, "parts")
    times = ("time", "memory/peak_gb", "speed/tokens_per_second")
    for one, other in zip(whole, parts, strict=True):
        same = {name for name in one if not name.startswith(("seconds/", "fleet/")) and name not in times}
        sums = {name for name in same if name.startswith("reward/")}  # added up by leader, and who samples what varies
        assert {name: one[name] for name in same - sums} == {name: other.get(name) for name in same - sums}
        assert {name: one[name] for name in sums} == pytest.approx({name: other[name] for name in sums}, rel=1e-12)
    ours, theirs = ({name: tensor for path in sorted((folder / run / "export").glob("*.safetensors"))
                     for name, tensor in load_file(path).items()} for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_export_answers_as_the_engine_did(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "whole" / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "whole" / "export")
    answers = [json.loads(line) for path in (folder / "whole" / "rollouts").glob("eval_greedy_step_0004.*")
               for line in path.read_text().splitlines()]
    assert len(answers) == 10
    for answer in answers:
        prompt = tokenizer(answer["prompt"], return_tensors="pt", return_token_type_ids=False)["input_ids"]
        assert prompt[0].tolist() == answer["prompt_ids"]
        with torch.no_grad():
            output = model.generate(prompt, do_sample=False, max_new_tokens=48, pad_token_id=0)
        assert output[0, prompt.size(1):].tolist() == answer["response_ids"]


def test_a_checkpoint_converts_to_what_the_run_exported(folder: Path):
    from megarl.checkpoint.convert import to_hf
    from megarl.checkpoint.inspect import newest
    from megarl.checkpoint.team import Team

    to_hf(newest(folder / "whole"), folder / "converted", Team())
    names = {path.name for path in (folder / "converted").iterdir()}
    assert names == {path.name for path in (folder / "whole" / "export").iterdir()} > {"tokenizer.json", "config.json"}
    for name in names - {"model.safetensors.index.json"}:  # the run's stages have files of their own
        if not name.endswith(".safetensors"):
            assert (folder / "converted" / name).read_bytes() == (folder / "whole/export" / name).read_bytes()
    ours, theirs = (weights(folder / place) for place in ("converted", "whole/export"))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def test_a_run_begins_with_another_ones_weights(folder: Path):
    """In another layout: it answers, before it trains, what that one answered last."""
    launch(folder, "begun", f"model.weights={folder / 'whole/checkpoints/step_00000004'}", "parallel.tensor=2",
           "parallel.expert=1", "run.steps=1", "data.prompts_per_step=8", "checkpoint.export=false")
    answers = [sorted((answer["prompt"], tuple(answer["response_ids"])) for path in sorted(
        (folder / run / "rollouts").glob(f"eval_greedy_step_{step}.*")) for answer in map(
            json.loads, path.read_text().splitlines())) for run, step in (("begun", "0000"), ("whole", "0004"))]
    assert answers[0] == answers[1] and len(answers[0]) == 10


def weights(folder: Path) -> dict[str, Any]:
    """All tensors of a Hugging Face directory."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_what_a_run_leaves(folder: Path):
    run = folder / "whole"
    assert (run / "reward.png").stat().st_size > 5_000 and list((run / "tensorboard").iterdir())
    assert [path.name for path in (run / "checkpoints").iterdir()] and (run / "config.yaml").exists()
    assert not (run / "exit.json").exists()
    final = metrics(folder, "whole")[-1]
    for name in ("eval/sampled/reward", "eval/sampled/pass@4", "eval/greedy/reward", "moe/load_max/1", "optim/lr",
                 "seconds/rollout", "packing/balance", "reward/mean"):
        assert math.isfinite(final[name]), name
    samples = [json.loads(line) for path in (run / "rollouts").glob("step_0002.*")
               for line in path.read_text().splitlines()]
    assert len({(s["position"], s["n"]) for s in samples}) == len(samples) == 48 * 8
