"""What a checkpoint is, read from its index alone: a run's, a converted one, or a Hugging Face directory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.megatron_dir import BESIDE, MegatronDir, common_state, is_megatron, read_index, stored_model
from megarl.checkpoint.safetensors_dir import SafetensorsDir
from megarl.errors import UserMistake
from megarl.model.families import tables
from megarl.model.hf_config import HFConfig
from megarl.sync.checksum import tensor_checksum

WEIGHTS, OTHER = "weights", "other"
_PARTS = (("embedding", r"embed"), ("head", r"output_layer|lm_head"), ("router", r"router|\.gate\.|e_score"),
          ("shared expert", r"shared_expert"), ("experts", r"experts\."), ("mlp", r"\.mlp\.linear|\.mlp\.\w+_proj"),
          ("attention", r"self_att.*(linear|proj|layernorm|norm)"), ("norms", r"norm"))


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        key: its name there.
        use: weights, or what the optimizer keeps of them ("optimizer.state.exp_avg"), or other.
        part: of the model.
        size, dtype: of the whole tensor.
        boxes: in how many pieces it lies there.
    """

    key: str
    use: str
    part: str
    size: tuple[int, ...]
    dtype: torch.dtype
    boxes: int

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Summary:
    """A checkpoint.

    Attributes:
        kind: what made it.
        facts: name -> value, to be shown.
        tensors: all that it holds.
    """

    kind: str
    facts: dict[str, str]
    tensors: list[Stored]


def newest(path: Path) -> Path:
    """The checkpoint that is meant by a path: the newest whole one of a run directory or its checkpoints/, else itself.

    Raises:
        UserMistake: nothing is there.
    """
    if not path.is_dir():
        raise UserMistake("there is no such directory", str(path), "give a checkpoint, or the directory of a run")
    for folder in (path, path / "checkpoints"):
        steps = [step for step in folder.glob("step_*") if re.fullmatch(r"step_\d{8}", step.name)]
        if steps:
            return max(steps)
    return path


def summarise(path: Path) -> Summary:
    """Look at a checkpoint.

    Raises:
        UserMistake: it is none, or damaged.
    """
    if not is_megatron(path):
        return _of_hugging_face(path)
    common, (tensors, _) = common_state(path), read_index(path)
    found = [Stored(key, *_use(key), tuple(one.size), one.properties.dtype, len(one.chunks))
             for key, one in tensors.items()]
    identity, progress = common.get("identity", {}), common.get("progress", {})
    facts = {"step": progress.get("step"), "updates": common.get("updates"), "position": progress.get("position"),
             "model": _model(stored_model(path, common)), "layout": _layout(common.get("settings", {})),
             "ranks": common.get("world"), "objective": identity.get("objective"),
             "versions": _pairs(common.get("versions")), "converted from": common.get("converted_from"),
             "layers": "apart" if any(".layers.0." in key for key in tensors) else "stacked"}
    kind = "converted from Hugging Face" if "converted_from" in common else "of a run"
    return Summary(f"Megatron-core checkpoint, {kind}", _shown(facts, path), found)


def _of_hugging_face(path: Path) -> Summary:
    hf, weights = HFConfig.read(path), SafetensorsDir(path)
    found = [Stored(name, "beside" if tables.is_beside(name, hf) else WEIGHTS, _part(name), weights.shape(name),
                    weights.dtype(name), 1) for name in weights.files]
    return Summary("Hugging Face checkpoint", _shown({"model": _model(hf), "dtype of the config": hf.dtype}, path),
                   found)


def checksums(path: Path) -> Iterator[tuple[str, str]]:
    """(name, checksum) of each weight, under Hugging Face's names: equal lines mean equal dtype, shape and bits.

    One tensor at a time is in memory.
    """
    hf = stored_model(path) if is_megatron(path) else HFConfig.read(path)
    weights = MegatronDir(path, hf) if is_megatron(path) else SafetensorsDir(path)
    for tensor in tables.hf_tensors(hf):
        yield tensor.name, tensor_checksum(weights.read(tensor.name, tensor.shape))
        weights.close()


def sizes(summary: Summary) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Bytes by part and use: (uses, {part: {use: bytes}}), in the order of a model."""
    uses = list(dict.fromkeys([WEIGHTS, *sorted({tensor.use for tensor in summary.tensors} - {WEIGHTS})]))
    order = ["embedding", "attention", "mlp", "router", "shared expert", "experts", "norms", "head", OTHER]
    table: dict[str, dict[str, int]] = {part: {} for part in order}
    for tensor in summary.tensors:
        table[tensor.part][tensor.use] = table[tensor.part].get(tensor.use, 0) + tensor.bytes
    return uses, {part: row for part, row in table.items() if row}


def _use(key: str) -> tuple[str, str]:
    """(use, part) of a key of a Megatron-core checkpoint."""
    if key.startswith(BESIDE):
        return "beside", _part(key.removeprefix(BESIDE))
    found = re.match(r"(?:(.*?)\.)??(?=(?:decoder|embedding|output_layer)\.)", key)
    return (found.group(1) or WEIGHTS, _part(key)) if found else (OTHER, OTHER)


def _part(key: str) -> str:
    return next((part for part, pattern in _PARTS if re.search(pattern, key)), OTHER)


def _model(hf: HFConfig) -> str:
    experts = f", {hf.experts} experts, {hf.top_k} per token" if hf.experts else ""
    return f"{hf.family}, {hf.layers} layers, hidden {hf.hidden}, vocabulary {hf.vocab}{experts}"


def _layout(settings: dict[str, Any]) -> str | None:
    """The degrees that a run's config asked for, and its schedule."""
    parallel = settings.get("parallel")
    if not parallel:
        return None
    degrees = " ".join(f"{name} {parallel[name]}" for name in ("tensor", "pipeline", "context", "expert",
                                                               "expert_tensor") if parallel.get(name, 1) != 1)
    schedule = f", {settings['pipeline']['schedule']}" if parallel.get("pipeline", 1) > 1 else ""
    return (degrees or "data alone") + schedule


def _pairs(found: Any) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in found.items()) if isinstance(found, dict) else found


def _shown(facts: dict[str, Any], path: Path) -> dict[str, str]:
    """Without what is not known; with the files."""
    files = [file for file in path.iterdir() if file.is_file()]
    facts |= {"files": f"{len(files)}, {megabytes(sum(file.stat().st_size for file in files))}"}
    return {name: str(value) for name, value in facts.items() if value is not None}


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
