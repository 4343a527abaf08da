"""TRL's side of tests/bench/grpo_step.py: runs in TRL's own environment, knows nothing of megarl.

    OMP_NUM_THREADS=2 python grpo_step_trl.py SETTINGS.json
    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 --standalone grpo_step_trl.py SETTINGS.json

SETTINGS.json: model, data (folder and JSONL with `prompt` and `label`), prompts, samples, tokens (longest response),
minibatches (optimizer steps per experience), experiences, lr, out. Rank 0 writes to `out`: when each experience was
finished (seconds), and the last one's mean response length and reward.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes the time after the last optimizer step of each experience."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches, self.times = minibatches, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after an optimizer step."""
        if state.global_step % self.minibatches == 0:
            self.times.append(time.time())


def exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """1 for an answer that equals its label."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, label, strict=True)]


def main() -> None:
    """Train and write the times."""
    given = json.loads(Path(sys.argv[1]).read_text())
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    moe = "num_experts" in AutoConfig.from_pretrained(given["model"]).to_dict()
    model = AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=torch.float32, attn_implementation="sdpa",
        **({"experts_implementation": given["experts_implementation"]} if moe else {}))
    clock = Clock(given["minibatches"])
    config = GRPOConfig(
        output_dir=str(Path(given["out"]).with_suffix(".trl")), use_cpu=True, bf16=False, seed=0,
        per_device_train_batch_size=given["prompts"] * given["samples"] // given["minibatches"] // world,
        gradient_accumulation_steps=1, steps_per_generation=given["minibatches"], num_iterations=1,
        max_steps=given["experiences"] * given["minibatches"], num_generations=given["samples"],
        max_completion_length=given["tokens"], temperature=1.0, loss_type="grpo", epsilon=0.2, beta=0.0,
        scale_rewards="group", learning_rate=given["lr"], lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, gradient_checkpointing=False, logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        **({"ddp_backend": "gloo", "ddp_find_unused_parameters": moe} if world > 1 else {}))
    rows = [json.loads(line) for line in Path(given["data"]).read_text().splitlines()]
    seen: list[tuple[float, float]] = []

    def scored(completions: list[str], label: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = exact(completions, label)
        seen.append((sum(map(len, completion_ids)) / len(rewards), sum(rewards) / len(rewards)))
        return rewards

    trainer = GRPOTrainer(model=model, reward_funcs=scored, args=config, train_dataset=Dataset.from_list(rows),
                          processing_class=AutoTokenizer.from_pretrained(given["model"]), callbacks=[clock])
    trainer.train()
    if trainer.accelerator.is_main_process:
        last = seen[-given["average"]:]
        Path(given["out"]).write_text(json.dumps({
            "times": clock.times, "length": sum(length for length, _ in last) / len(last),
            "reward": sum(reward for _, reward in last) / len(last)}))
    if torch.distributed.is_initialized():  # a process that ends with gloo's threads running may abort
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
