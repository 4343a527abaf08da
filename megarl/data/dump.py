"""Experiences on disk: what a step was trained on, as each leader held it, to be trained on again without engines.

One safetensors file for each leader and step, `step_0001.part0of2.safetensors`: the arrays of its `SampleBatch`
(tokens, engine log-probs, versions, rewards, experts if they are replayed ...), and in the header, as JSON, what else
the step says of itself. The step's number is the one that its metrics have. Beside them `config.json`, the config of
the run that wrote them. No pickles. Any number of leaders can read what any number has written.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megarl.data.ragged import SampleBatch
from megarl.errors import UserMistake

FORMAT = 1
CONFIG = "config.json"
_NAME = re.compile(r"step_(\d+)\.part(\d+)of(\d+)\.safetensors")
_SAMPLED = ("model.path", "data.", "reward.terms", "environments", "rollout.temperature", "rollout.samples_per_prompt",
            "rollout.max_response_tokens", "rollout.stop", "rollout.max_lag")  # keys that samples depend on


@dataclass(frozen=True)
class Recorded:
    """One leader's part of a step.

    Attributes:
        samples: scored.
        version: of the weights when the step was taken.
        position, unfinished: where the data goes on, and what was drawn before and not trained on (see `Taken`).
        metrics: of sampling and rewards, over all leaders.
    """

    samples: SampleBatch
    version: str
    position: int
    unfinished: tuple[int, ...]
    metrics: dict[str, float]


def write_part(folder: Path | str, step: int, part: int, parts: int, recorded: Recorded) -> Path:
    """Write one leader's part, whole or not at all; returns its path. An existing file is replaced.

    Args:
        step: as in the metrics, from 1.
        part, parts: number of this leader, and how many there are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {one.name: getattr(recorded.samples, one.name) for one in fields(SampleBatch)}
    header = {"format": FORMAT, "step": step, "version": recorded.version, "position": recorded.position,
              "unfinished": recorded.unfinished, "metrics": recorded.metrics}
    if part == 0:  # of an earlier life with other leaders, which got as far
        for old in folder.glob(f"step_{step:04d}.part*of*.safetensors"):
            if not old.name.endswith(f"of{parts}.safetensors"):
                old.unlink()
    target = folder / f"step_{step:04d}.part{part}of{parts}.safetensors"
    partial = target.with_suffix(".partial")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}, partial,
              metadata={"experience": json.dumps(header)})
    os.replace(partial, target)
    return target


def read_parts(folder: Path | str, step: int, leader: int, leaders: int) -> list[Recorded]:
    """The parts of a step that fall to one of `leaders`: leader, leader + leaders, ...; there may be none.

    Every leader looks for all parts, so that a missing one ends them all.

    Raises:
        UserMistake: the step or a part of it is not there, or a file is damaged or of another format.
    """
    folder = Path(folder)
    steps = _index(folder)
    if step not in steps:
        known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none"
        raise UserMistake(f"there is no step {step}: {known}", str(folder),
                          "lower run.steps, or name another directory")
    found = steps[step]
    for parts in {parts for _, parts in found}:
        if len({of for _, of in found}) > 1 or len(found) != parts:
            names = ", ".join(sorted(path.name for path in found.values()))
            raise UserMistake(f"step {step} is not whole: there are {names}", str(folder),
                              "copy all parts of one run, and no others")
    return [_read(path) for (part, _), path in sorted(found.items()) if part % leaders == leader]


def joined(parts: list[Recorded]) -> SampleBatch | None:
    """The samples of several parts; None for none."""
    if not parts:
        return None
    batches = [part.samples for part in parts if len(part.samples)] or [parts[0].samples]
    arrays: dict[str, Any] = {}
    for one in fields(SampleBatch):
        values = [getattr(samples, one.name) for samples in batches]
        known = [value for value in values if value is not None]
        if known and len(known) < len(values):
            raise ValueError(f"only some parts have {one.name}")
        arrays[one.name] = np.concatenate(known) if known else None
    return SampleBatch(**arrays)


def write_config(folder: Path | str, config: dict[str, Any]) -> None:
    """Keep the run's config (JSON values) with its experiences."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{CONFIG}.partial"
    partial.write_text(json.dumps(config, indent=1), encoding="utf-8")
    os.replace(partial, folder / CONFIG)


def differences(folder: Path | str, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What the samples depend on and is set otherwise now: key -> (when they were sampled, now).

    Raises:
        UserMistake: there is no config with the experiences, or it cannot be read.
    """
    path = Path(folder) / CONFIG
    try:
        sampled = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserMistake("no such file: this is not a directory of experiences", str(path),
                          "name the directory that debug.dump_experience had") from None
    except (OSError, ValueError) as error:
        raise UserMistake(f"it cannot be read: {error}", str(path), "copy it again") from None
    before, now = ({key: value for key, value in _flat(one).items() if key.startswith(_SAMPLED)}
                   for one in (sampled, config))
    return {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {key: value for name, part in tree.items()
                for key, value in _flat(part, f"{path}.{name}".lstrip(".")).items()}
    return {path: tree}


def _index(folder: Path) -> dict[int, dict[tuple[int, int], Path]]:
    """step -> (part, parts) -> file."""
    steps: dict[int, dict[tuple[int, int], Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if found := _NAME.fullmatch(path.name):
            step, part, parts = map(int, found.groups())
            steps.setdefault(step, {})[part, parts] = path
    return steps


def _read(path: Path) -> Recorded:
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["experience"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserMistake(f"the file is damaged: {error!r}", str(path), "copy it again") from None
    known = {one.name for one in fields(SampleBatch)}
    if header.get("format") != FORMAT or not set(arrays) <= known:
        raise UserMistake(f"format {header.get('format')} with {sorted(set(arrays) - known) or 'known arrays'}; this "
                          f"version reads format {FORMAT}", str(path), "read it with the version that wrote it")
    try:
        return Recorded(SampleBatch(**arrays), header["version"], header["position"], tuple(header["unfinished"]),
                        header["metrics"])
    except (TypeError, KeyError, ValueError) as error:
        raise UserMistake(f"the file is damaged: {error!r}", str(path), "copy it again") from None
