"""A tiny Qwen3 for the sort task that is right about one time in five, as a Hugging Face checkpoint.

A randomly initialised model earns no reward, so there would be nothing to reinforce. The warm start teaches four
procedures at once: the label of a prompt is its digits sorted (with probability `SORTED_SHARE`), descending, reversed
or copied. The model can only learn the shares, so its sampled reward starts near `SORTED_SHARE` and RL has to make it
choose the right procedure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megarl.examples import sort_task as task

SORTED_SHARE = 0.2
AUX_COEFFICIENT = 1e-3
LR_WARMUP = 30  # steps
DONE_FILE = "task.json"


@dataclass(frozen=True)
class Options:
    """What the result depends on; the same options give the same files."""

    layers: int = 8
    experts: int = 8  # of which 2 are used; 0: a dense model
    seed: int = 0
    steps: int = 400
    batch: int = 128
    lr: float = 3e-3
    train_prompts: int = 8192
    heldout_prompts: int = 384
    recipe: int = 1  # raised when this file makes something else of the same options


def make(folder: Path, options: Options, progress: Callable[[int, float], None] = lambda step, loss: None) -> dict:
    """Fill `folder` with `model/`, `train.jsonl`, `heldout.jsonl` and `task.json`, unless it is complete already.

    Args:
        progress: called after each step of the warm start with the number of steps done and the loss.
    Returns:
        the content of task.json: the options, and the mean held-out reward of the model, `sampled` and `greedy`.
    """
    done = folder / DONE_FILE
    if done.is_file():
        report = json.loads(done.read_text())
        if report["options"] == asdict(options):
            return report
        done.unlink()
    (folder / "model").mkdir(parents=True, exist_ok=True)
    task.write_prompts(folder / "train.jsonl", options.train_prompts, options.seed, held_out=False)
    task.write_prompts(folder / "heldout.jsonl", options.heldout_prompts, options.seed, held_out=True)
    task.write_tokenizer(folder / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = new_model(options.layers, options.experts)
        train(model, options, progress)
        model.save_pretrained(folder / "model")
        strings = task.read_prompts(folder / "heldout.jsonl")
        report = {"options": asdict(options), "parameters": model.num_parameters(),
                  "sampled": mean_reward(model, strings, greedy=False),
                  "greedy": mean_reward(model, strings, greedy=True)}
    done.write_text(json.dumps(report, indent=1) + "\n")
    return report


def new_model(layers: int, experts: int, *, vocabulary: int = len(task.VOCABULARY), positions: int = 64,
              eos_id: int = task.EOS_ID) -> PreTrainedModel:
    """Qwen3-MoE (Qwen3 if `experts` is 0) of hidden size 64, 4 heads on 2 key/value heads; random weights."""
    common = dict(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.05,
        max_position_embeddings=positions, tie_word_embeddings=False, pad_token_id=task.PAD_ID,
        bos_token_id=task.BOS_ID, eos_token_id=eos_id, attn_implementation="sdpa")
    if experts:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            **common, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
            router_aux_loss_coef=AUX_COEFFICIENT, experts_implementation="eager"))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    # transformers leaves the padding row 0. RMSNorm's gradient at 0 is 1/sqrt(eps) = 1000: one sampled <pad> in RL
    # would then fill the gradient norm and, through clipping, waste the step
    torch.nn.init.normal_(model.model.embed_tokens.weight.data[task.PAD_ID], std=0.05)
    return model


def train(model: PreTrainedModel, options: Options, progress: Callable[[int, float], None]) -> None:
    """Train `model` in place on the mixture of the four procedures, held-out strings left out."""
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, options.steps))
    rng = np.random.default_rng([options.seed, 2])
    strings = task.draw(rng, held_out=False)
    model.train()
    for step in range(options.steps):
        ids_bt, labels_bt = _batch(list(islice(strings, options.batch)), rng)
        router = {"output_router_logits": True} if options.experts else {}  # adds the balancing loss
        output = model(ids_bt, labels=labels_bt, attention_mask=ids_bt != task.PAD_ID, **router)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step + 1, output.loss.item())
    model.eval()


def warm_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: linear up over `LR_WARMUP` steps, then a cosine to 0."""
    if step < LR_WARMUP:
        return (step + 1) / LR_WARMUP
    return 0.5 * (1 + np.cos(np.pi * (step - LR_WARMUP) / max(1, steps - LR_WARMUP)))


def _batch(strings: list[str], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [batch, longest]; labels are -100 outside the answer."""
    ids_bt = torch.full((len(strings), 3 + 2 * task.MAX_DIGITS + 1), task.PAD_ID)
    labels_bt = torch.full_like(ids_bt, -100)
    for number, digits in enumerate(strings):
        ascending = "".join(sorted(digits))
        wrong = (ascending[::-1], digits[::-1], digits)[int(rng.integers(3))]
        prompt = task.prompt_ids(digits)
        answer = task.answer_ids(ascending if rng.random() < SORTED_SHARE else wrong)
        ids_bt[number, :len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels_bt[number, len(prompt):len(prompt) + len(answer)] = torch.tensor(answer)
    return ids_bt, labels_bt


@torch.no_grad()
def mean_reward(model: PreTrainedModel, strings: list[str], *, greedy: bool) -> float:
    """Share of these digit strings that the model sorts without a fault, sampled at temperature 1 or greedily."""
    right = 0
    choice = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    how = GenerationConfig(max_new_tokens=task.MAX_RESPONSE_TOKENS, pad_token_id=task.PAD_ID, eos_token_id=task.EOS_ID,
                           **choice)
    for length in range(task.MIN_DIGITS, task.MAX_DIGITS + 1):
        same = [digits for digits in strings if len(digits) == length]
        if not same:
            continue
        prompts_bt = torch.tensor([task.prompt_ids(digits) for digits in same])
        answers_bt = model.generate(prompts_bt, generation_config=how)[:, prompts_bt.shape[1]:]
        for digits, answer in zip(same, answers_bt.tolist(), strict=True):
            expected = task.answer_ids("".join(sorted(digits)))
            right += answer[:len(expected)] == expected
    return right / len(strings)
