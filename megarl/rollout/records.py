"""Samples as JSONL, one line each: what was asked, answered and rewarded, and by which weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.data.sample import Group, Sample


def write_rollouts(run_dir: Path | str, step: int, rank: int, groups: Iterable[Group],
                   prefix: str = "") -> Path:
    """Write all samples of `groups` to `run_dir/rollouts/<prefix>step_<step>.rank<rank>.jsonl`, whole or not at all.

    Returns:
        The file's path. An existing file (of an earlier life that got as far) is replaced.
    """
    folder = Path(run_dir) / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{prefix}step_{step:04d}.rank{rank}.jsonl"
    partial = target.with_suffix(".partial")
    # halves of characters, as labels may have them, as the escapes that JSON has for them
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        for group in groups:
            for sample in group.samples:
                file.write(json.dumps(_line(step, sample), ensure_ascii=False, default=str) + "\n")
    os.replace(partial, target)
    return target


def forget_after(run_dir: Path | str, step: int) -> None:
    """Remove the samples of steps after `step`: of an earlier life, whose checkpoint of them was never whole."""
    for path in (Path(run_dir) / "rollouts").glob("*step_*.rank*.jsonl"):
        if int(path.name.rpartition("step_")[2].partition(".")[0]) > step:
            path.unlink()


def _line(step: int, sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "step": step, "position": prompt.position, "epoch": prompt.epoch, "index": prompt.index, "n": sample.n,
        "source": prompt.source, "prompt": prompt.text, "response": sample.text, "label": prompt.label,
        "reward": sample.reward, "reward_terms": sample.reward_terms, "finish": sample.finish, "seed": sample.seed,
        "versions": sample.versions, "prompt_ids": prompt.token_ids.tolist(),
        "response_ids": sample.response_ids.tolist(), "part": sample.part,
        "trained": None if sample.trained is None else sample.trained.astype(int).tolist(),
        "logprobs": [float(value) for value in sample.logprobs],
    }
