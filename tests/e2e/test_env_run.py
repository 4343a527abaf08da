"""A run of two tasks, one of several turns, through the real launcher: two trainers, one rollout rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_templates import stop_ids_of, tokenizer_of
from good_config import good_tree, write_files
from models import hf_model
from test_train import launch_tree, metrics

ENVIRONMENT = '''
import numpy as np

class Talk:
    """Two or three turns; each earns the share of even tokens in it. Every sixteenth episode breaks."""

    async def reset(self, task):
        self._rng, self._left, self._task = np.random.default_rng(task.seed), 2 + task.n % 2, task
        return [{"role": "system", "content": "Talk."}, {"role": "user", "content": str(task.text)}]

    async def step(self, action):
        self._left -= 1
        if self._task.n == 7 and self._task.position % 2:
            raise RuntimeError("the world ended")
        return str(self._rng.integers(1000)), sum(map(ord, action.text)) % 7 / 7, self._left == 0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environments")
    write_files(place)
    tokenizer = tokenizer_of("qwen2.5")
    hf_model("qwen3", vocab_size=408, eos_token_id=stop_ids_of("qwen2.5"), pad_token_id=tokenizer.pad_token_id
             ).save_pretrained(place / "talker")
    assert len(tokenizer) <= 408
    tokenizer.save_pretrained(place / "talker")
    (place / "world.py").write_text(ENVIRONMENT)
    (place / "talk.jsonl").write_text("".join(json.dumps({"prompt": f"{number} + 1"}) + "\n" for number in range(20)))
    tree = good_tree(place)
    tree["run"] = {"dir": str(place / "run"), "steps": 2, "seed": 5}
    tree["model"] |= {"path": str(place / "talker")}
    tree["parallel"] = {}
    tree["data"] = {"prompts_per_step": 16, "max_prompt_tokens": 96, "sources": [
        {"path": str(place / "talk.jsonl"), "label": "", "environment": "talk"},
        {"path": str(place / "talk.jsonl"), "label": "", "name": "once"}]}
    tree["environments"] = [{"name": "talk", "source": f"{place / 'world.py'}:Talk", "max_turn_tokens": 16,
                             "credit": "turn", "discount": 0.5}]
    tree["rollout"] |= {"samples_per_prompt": 8, "max_response_tokens": 120, "slots": 64,
                        "stop_token_ids": list(range(100, 140))}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 4, "hard": 120}}], "workers": 1}
    tree["objective"] = {"algorithm": "grpo"}
    tree["batch"] = {"minibatches": 2, "max_tokens": 1024}
    tree["eval"] = {"every": 2, "sets": [{"path": str(place / "talk.jsonl"), "name": "held", "label": "", "limit": 6,
                                          "environment": "talk"}]}
    tree["observe"] = {"rollouts": 1}
    launch_tree(place, tree)
    ahead = tree["rollout"] | {"max_lag": 2}
    run = tree["run"] | {"dir": str(place / "ahead"), "steps": 4}
    launch_tree(place, tree | {"run": run, "rollout": ahead, "eval": {}})
    return place


def test_engine_and_trainer_agree_over_turns(folder: Path) -> None:
    for step in metrics(folder, "run")[1:]:
        assert 0 < step["engine/gap_max"] < 1e-5
        assert 2 <= step["environment/talk/turns"] <= 3 and step["environment/talk/samples"] == 1
        assert step["reward/failed"] == step["environment/talk/failed"] > 0
        assert 0 < step["environment/talk/reward"] < 3
    assert 0 < metrics(folder, "run")[2]["eval/held/reward"] < 3


def test_metrics_of_a_run_that_samples_ahead_are_of_what_it_trains(folder: Path) -> None:
    retries = 0
    for step in metrics(folder, "ahead")[1:]:
        lines = [json.loads(line) for path in (folder / "ahead" / "rollouts").glob(f"step_{step['step']:04d}*")
                 for line in path.read_text().splitlines()]
        said = sum(sum(line["trained"] or [1] * len(line["response_ids"])) for line in lines)
        assert step["rollout/response_tokens"] == pytest.approx(said / len(lines)) and said
        assert step["rollout/truncated"] == sum(line["finish"] == "length" for line in lines) / len(lines)
        assert step.get("environment/talk/retries", 0) == step.get("environment/talk/failed", 0)  # one each
        retries += step.get("environment/talk/retries", 0)
    assert retries == 4 * 8  # one episode of each prompt


def test_what_was_trained_is_recorded(folder: Path) -> None:
    lines = [json.loads(line) for path in sorted((folder / "run" / "rollouts").glob("step_*"))
             for line in path.read_text().splitlines()]
    talk = [line for line in lines if line["source"] == "talk"]
    once = [line for line in lines if line["source"] == "once"]
    assert len(talk) == 2 * 8 * 8 and len(once) == 2 * 8 * 8
    assert all(line["trained"] is None for line in once)
    for line in talk:
        trained = np.array(line["trained"] or [1] * len(line["response_ids"]), bool)
        assert (np.array(line["logprobs"])[~trained] == 0).all() and trained[0] and trained[-1]
        broken = line["n"] == 7 and line["position"] % 2
        assert (line["reward"] is None) == bool(broken)
        if not broken:
            assert np.diff(np.append(False, trained).astype(int)).tolist().count(1) == 2 + line["n"] % 2
            assert line["response"].count("<|im_start|>user") == 1 + line["n"] % 2
