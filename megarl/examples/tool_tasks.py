"""The tasks with tools and a tiny Qwen3 for both: made on the spot, right about one time in five.

The model is warm-started on dialogues of which a part (`RIGHT_SHARE`) go the right way; the others go one of three
wrong ways (see `calculator_task.dialogue`, `search_task.dialogue`). It can only learn the shares, so RL has something
to choose from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.examples import calculator_task, search_task
from megarl.examples.warm_start import DONE_FILE, new_model, warm_cosine

TASKS = (calculator_task, search_task)
PAD, UNK, END = "<pad>", "<unk>", "<|end|>"
SPECIAL = [PAD, UNK, END, "<|user|>", "<|assistant|>", "<|tool|>"]
ADDED = ["<tool_call>", "</tool_call>", '{"name": "calculate", "arguments": {"expression": "',
         '{"name": "search", "arguments": {"query": "', '"}}', *search_task.PEOPLE, *search_task.TOWNS, " lives in ",
         " has ", "nothing", "error"]
LETTERS = [*"0123456789+-*? "]
VOCABULARY, POSITIONS = 96, 128
RIGHT_SHARE = 0.2
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' -}}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Options:
    """What the result depends on; the same options give the same files."""

    layers: int = 4
    seed: int = 0
    steps: int = 500
    batch: int = 64
    lr: float = 3e-3
    train_prompts: int = 4096
    heldout_prompts: int = 192
    recipe: int = 1  # raised when this file makes something else of the same options


def make(folder: Path, options: Options, progress: Callable[[int, float], None] = lambda step, loss: None) -> dict:
    """Fill `folder` with `model/` and, for both tasks, `NAME.jsonl` and `NAME-heldout.jsonl`, unless it is complete.

    Args:
        progress: called after each step of the warm start with the number of steps done and the loss.
    Returns:
        the content of task.json.
    """
    done = folder / DONE_FILE
    if done.is_file():
        report = json.loads(done.read_text())
        if report["options"] == asdict(options):
            return report
        done.unlink()
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for held_out, count in ((False, options.train_prompts), (True, options.heldout_prompts)):
            rng = np.random.default_rng([options.seed, held_out])
            lines = [json.dumps({"prompt": question, "label": task.label(question)})
                     for question in islice(task.questions(rng, held_out=held_out), count)]
            (folder / f"{task.NAME}{'-heldout' * held_out}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = new_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = new_model(options.layers, 0, vocabulary=VOCABULARY, positions=POSITIONS,
                          eos_id=tokenizer.convert_tokens_to_ids(END))
        loss = train(model, tokenizer, options, progress)
        model.save_pretrained(folder / "model")
    report = {"options": asdict(options), "parameters": model.num_parameters(), "loss": loss}
    done.write_text(json.dumps(report, indent=1) + "\n")
    return report


def new_tokenizer() -> Any:
    """A tokenizer of whole words where the tasks have words, else of letters, with a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*SPECIAL, *LETTERS])},
                                       unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, unk_token=UNK, eos_token=END,
                                        clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in ADDED])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train(model: Any, tokenizer: Any, options: Options, progress: Callable[[int, float], None]) -> float:
    """Train in place on dialogues of both tasks; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, options.steps))
    rng = np.random.default_rng([options.seed, 2])
    questions = [task.warm_questions(rng) for task in TASKS]
    model.train()
    loss = float("nan")
    for step in range(options.steps):
        dialogues = [task.dialogue(next(asked), rng, RIGHT_SHARE) for _ in range(options.batch // len(TASKS))
                     for task, asked in zip(TASKS, questions, strict=True)]
        ids_bt, labels_bt = _batch(dialogues, tokenizer)
        output = model(ids_bt, labels=labels_bt, attention_mask=ids_bt != tokenizer.pad_token_id)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss = output.loss.item()
        progress(step + 1, loss)
    model.eval()
    return loss


def _batch(dialogues: list[list[dict[str, Any]]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [batch, longest]; labels are -100 outside the model's own words and the end of its turn."""
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", END])
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in
            (tokenizer.apply_chat_template(dialogue, tokenize=False) for dialogue in dialogues)]
    ids_bt = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels_bt = torch.full_like(ids_bt, -100)
    for number, row in enumerate(rows):
        ids_bt[number, :len(row)] = torch.tensor(row)
        speaking = False
        for place, token in enumerate(row):
            if speaking:
                labels_bt[number, place] = token
            speaking = token == assistant or (speaking and token != end)
    return ids_bt, labels_bt
