"""Episodes of several turns, with tools, sampled by the real SGLang: the two examples in one run, through the launcher.

The run samples ahead and asks again for what a publish aborts. Tokens that the newest weights sampled must have the
trainer's log-probs on the whole conversation: so what is trained on is what was sampled, turn by turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from good_config import write_tree
from transformers import AutoTokenizer

from megarl.examples.tool_tasks import Options, make

ROOT = Path(__file__).resolve().parents[2]
TASKS, STEPS, PROMPTS, SAMPLES = ("calculator", "search"), 4, 8, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, interpreter: str) -> Path:
    """A finished run, from a model that has seen just enough to call tools."""
    place = tmp_path_factory.mktemp("sglang-environments")
    make(place / "tasks", Options(steps=60, train_prompts=64, heldout_prompts=8))
    sets = [{"path": str(place / "tasks" / f"{task}-heldout.jsonl"), "name": task, "environment": task}
            for task in TASKS]
    tree = {
        "run": {"dir": str(place / "run"), "steps": STEPS},
        "cluster": {"trainers": 1, "rollouts": 1, "device": "cpu", "timeout_s": 60, "start_timeout_s": 240},
        "model": {"path": str(place / "tasks" / "model"), "implementation": "local", "dtype": "fp32"},
        "data": {"sources": [{"path": str(place / "tasks" / f"{task}.jsonl"), "environment": task} for task in TASKS],
                 "chat_template": "always", "max_prompt_tokens": 16, "prompts_per_step": PROMPTS},
        "environments": [{"name": "calculator", "source": "calculator", "max_turns": 3},
                         {"name": "search", "source": "search", "options": {"per_find": 0.1}, "max_turns": 4,
                          "credit": "turn"}],
        "rollout": {"engine": "sglang", "sglang_python": interpreter, "samples_per_prompt": SAMPLES,
                    "max_response_tokens": 64, "max_lag": 1, "on_update": "abort"},
        "objective": {"algorithm": "grpo"}, "batch": {"minibatches": 2, "max_tokens": 4096}, "optim": {"lr": 3e-3},
        "eval": {"every": 2, "sets": sets}, "checkpoint": {"every": 0}, "observe": {"rollouts": 1}}
    done = subprocess.run(["bash", str(ROOT / "launch" / "torchrun.sh"), str(write_tree(place, tree))], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400,
                          env={**os.environ, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    return place


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / "run" / "rollouts").glob(f"{kind}_*"))
            for line in path.read_text().splitlines()]


def test_engine_and_trainer_agree_over_turns(folder: Path) -> None:
    steps = metrics(folder)[1:]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert 0 < steps[0]["engine/gap_max"] < 1e-4 and steps[0]["lag/0/share"] == 1
    newest = [step["lag/0/gap"] for step in steps if step["lag/0/share"]]
    assert max(newest) < 1e-5, newest
    assert any(step["lag/1/share"] and step["lag/1/gap"] > 1e-4 for step in steps)  # weights that moved are told apart
    print(f"mean gaps of the newest tokens: {newest}")
    for step in steps:
        assert step["reward/failed"] == 0 and not [name for name in step if name.startswith("rollout/failed")]


def test_tools_are_called_and_what_they_say_is_not_trained_on(folder: Path) -> None:
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "tasks" / "model"), Counter()
    for line in samples(folder):
        heard = [token for token, kept in zip(line["response_ids"], line["trained"] or [], strict=False) if not kept]
        told = tokenizer.decode(heard, skip_special_tokens=False)
        said = sum(line["trained"] or [1] * len(line["response_ids"]))
        assert sum(end - start for _, start, end in line["versions"]) == said > 0
        assert all(line["step"] - 1 - int(version.rpartition(":")[2]) in (0, 1) for version, _, _ in line["versions"])
        found[line["source"], "tool"] += "<|tool|>" in told
        found[line["source"], "turns"] += told.count("<|assistant|>")
    assert len(samples(folder)) == STEPS * PROMPTS * SAMPLES
    assert all(found[task, what] > 10 for task in TASKS for what in ("tool", "turns")), found


def test_evaluations_between(folder: Path) -> None:
    for step in metrics(folder)[::2]:
        assert all(step[f"eval/{task}/unanswered"] == step[f"eval/{task}/unscored"] == 0 for task in TASKS)
    (version,) = {version for line in samples(folder, "eval_calculator_step") if line["step"] == 2
                  for version, _, _ in line["versions"]}
    assert version.endswith(":2")
