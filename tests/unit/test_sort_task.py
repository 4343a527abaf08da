"""The quickstart's task: split, labels, tokenizer, files; a warm start of two steps."""

import hashlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from megarl.examples import sort_task as task


def digests(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def test_rows_and_split(tmp_path):
    assert task.row("302") == {"prompt": "sort 3 0 2 =", "label": "0 2 3"}
    task.write_prompts(tmp_path / "train.jsonl", 2000, 0, held_out=False)
    task.write_prompts(tmp_path / "heldout.jsonl", 384, 0, held_out=True)
    train, held_out = (task.read_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "heldout"))
    assert len(set(train)) == 2000 and len(set(held_out)) == 384
    assert not set(train) & set(held_out)
    assert {len(digits) for digits in held_out} == {3, 4, 5}
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0]) == task.row(train[0])
    share = np.mean([task.is_held_out(f"{number:04d}") for number in range(10000)])
    assert share == pytest.approx(0.1, abs=0.01)
    drawn = list(itertools.islice(task.draw(np.random.default_rng(1), held_out=False), 3000))
    assert not any(map(task.is_held_out, drawn))
    assert [sum(len(digits) == length for digits in drawn) / 3000 for length in (3, 4, 5)] == pytest.approx(
        [1 / 3] * 3, abs=0.03)


def test_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    assert len(set(task.VOCABULARY)) == 64
    task.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 64
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    row = task.row("9417")
    assert tokenizer(row["prompt"])["input_ids"] == task.prompt_ids("9417")
    assert tokenizer.decode(task.answer_ids("1479"), skip_special_tokens=True) == row["label"]


@pytest.mark.parametrize("experts", [8, 0])
def test_warm_start(tmp_path, experts):
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.examples.warm_start import Options, make

    options = Options(layers=1, experts=experts, steps=2, batch=8, train_prompts=20, heldout_prompts=10)
    steps = []
    report = make(tmp_path / "a", options, lambda step, loss: steps.append(step))
    assert steps == [1, 2] and report["options"]["layers"] == 1
    torch.manual_seed(5)
    assert make(tmp_path / "b", options) == report
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert make(tmp_path / "a", options, lambda step, loss: steps.append(step)) == report
    assert steps == [1, 2]  # it was there
    before = digests(tmp_path / "a")
    make(tmp_path / "a", replace(options, seed=1))
    assert all(before[name] != digest for name, digest in digests(tmp_path / "a").items()
               if name.endswith(("jsonl", "safetensors")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    assert model.config.model_type == ("qwen3_moe" if experts else "qwen3")
    assert model.dtype == torch.float32 and model.num_parameters() == report["parameters"]


def test_mean_reward():
    """On a stand-in that always answers ascending digits, but for strings with a 7, whose end it forgets."""
    import torch

    from megarl.examples import warm_start

    class Sorter:
        def generate(self, prompts_bt, generation_config):
            rows = []
            for prompt in prompts_bt.tolist():
                digits = "".join(sorted(str(token - task.ZERO_ID) for token in prompt[2:-1]))
                answer = task.answer_ids(digits)
                rows.append(prompt + (answer[:-1] + [task.ZERO_ID] if "7" in digits else answer))
            return torch.tensor(rows)

    assert warm_start.mean_reward(Sorter(), ["312", "7012", "55555", "123"], greedy=True) == 0.75
