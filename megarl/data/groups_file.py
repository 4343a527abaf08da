"""Sampled groups in a file and back: what a checkpoint keeps of the sampling that is ahead of the training.

A safetensors file: arrays by "<group>.<sample>.<name>", the rest as JSON in an array of bytes (a file's own header has
a limit, which texts would reach). No pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from megarl.data.sample import Group, Prompt, Sample

_ARRAYS = ("response_ids", "logprobs", "trained", "advantages", "experts")
_VALUES = ("n", "seed", "finish", "text", "versions", "reward", "reward_terms", "part")


def write_groups(path: Path, groups: Mapping[int, Group]) -> None:
    """Write scored groups, each under a number."""
    arrays: dict[str, np.ndarray] = {}
    told: list[list[dict[str, Any]]] = []
    positions = []
    for number, group in groups.items():
        positions.append(group.prompt.position)
        told.append([])
        for place, sample in enumerate(group.samples):
            told[-1].append({name: getattr(sample, name) for name in _VALUES})
            arrays[f"{number}.{place}.prompt"] = np.ascontiguousarray(sample.prompt.token_ids)
            for name in _ARRAYS:
                if (value := getattr(sample, name)) is not None:
                    arrays[f"{number}.{place}.{name}"] = np.ascontiguousarray(value)
    rest = json.dumps({"numbers": list(groups), "positions": positions, "samples": told}, ensure_ascii=False)
    arrays["groups"] = np.frombuffer(rest.encode(), np.uint8)
    save_file(arrays, path)


def read_positions(path: Path) -> dict[int, int]:
    """The positions of the prompts of a file's groups, by the groups' numbers."""
    with safe_open(path, framework="numpy") as file:
        header = _header(file)
    return dict(zip(header["numbers"], header["positions"], strict=True))


def _header(file: Any) -> dict[str, Any]:
    return json.loads(file.get_tensor("groups").tobytes())


def read_groups(path: Path, prompt_at: Callable[[int], Prompt]) -> dict[int, Group]:
    """The groups of a file, by their numbers.

    Args:
        path: written by `write_groups`.
        prompt_at: the prompt of a position, as the data gives it.
    """
    groups: dict[int, Group] = {}
    with safe_open(path, framework="numpy") as file:
        header = _header(file)
        known = set(file.keys())
        for number, position, samples in zip(header["numbers"], header["positions"], header["samples"], strict=True):
            prompt = prompt_at(position)
            groups[number] = Group(prompt, [])
            for place, told in enumerate(samples):
                arrays = {name: file.get_tensor(f"{number}.{place}.{name}") for name in _ARRAYS
                          if f"{number}.{place}.{name}" in known}
                own = replace(prompt, token_ids=file.get_tensor(f"{number}.{place}.prompt"))
                told["versions"] = [tuple(span) for span in told["versions"]]
                groups[number].samples.append(Sample(prompt=own, **told, **arrays))
    return groups
