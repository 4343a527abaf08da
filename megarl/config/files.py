"""Checks of the files that a config names: the model's directory, prompt files, the run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.schema import Config
from megarl.errors import UserMistake

if TYPE_CHECKING:
    from megarl.data.rows import Rows

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_READ_BYTES = 32 << 20  # about a second of JSON


def weights_read(config: Config, reference: bool) -> tuple[bool, bool]:
    """Whether anything will read the weights in model.path, and those in model.weights.

    The trainers begin with them, unless they go on from a checkpoint, and keep them where a KL term needs a reference
    model; engines on rollout ranks start with those of model.path, and the export at the end takes dtypes from there.

    Args:
        config: the run.
        reference: whether a KL term needs a reference model.
    """
    from megarl.checkpoint.files import is_begun  # light, but above this package

    trains, resumes = not config.debug.rollout_only, config.checkpoint.resume
    goes_on = trains and resumes and is_begun(Path(config.run.dir) / "checkpoints")
    trainers = reference or not goes_on
    dummies = config.rollout.engine == "sglang" and config.sglang.get("load_format") == "dummy"
    engines = config.cluster.rollouts > 0 and not dummies
    exports = trains and config.checkpoint.export
    return engines or exports or (trainers and not config.model.weights), trainers and bool(config.model.weights)


def check_model_files(path: str, weights: bool = True) -> Iterator[UserMistake]:
    """Mistakes in a Hugging Face checkpoint directory: shards or tensors missing, shards cut short, no tokenizer.

    config.json is not judged here (`model.hf_config` does it), nor the weights without `weights`.
    """
    directory = Path(path)
    if weights:
        yield from _check_shards(directory)
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        yield UserMistake(f"{directory} has no tokenizer", "model.path", f"it needs one of {', '.join(_TOKENIZERS)}")


def _check_shards(directory: Path) -> Iterator[UserMistake]:
    index = directory / "model.safetensors.index.json"
    shards: dict[str, set[str]] = {"model.safetensors": set()}  # file -> tensors that the index promises
    if index.is_file():
        try:
            shards = _shards(index)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield UserMistake(f"{index} is not an index of safetensors shards: {error!r}", "model.path",
                              "download the checkpoint again")
            return
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield UserMistake(f"{directory / missing[0]}{more} is not there", "model.path",
                          "download the checkpoint's missing files" if index.is_file() else
                          "give the directory of a checkpoint in safetensors format")
    for shard, promised in shards.items():
        if shard in missing:
            continue
        tensors = _tensors(directory / shard)
        if tensors is None:
            yield UserMistake(f"{directory / shard} is cut short or no safetensors file", "model.path",
                              "download it again")
        elif absent := promised - tensors:
            yield UserMistake(f"{directory / shard} has no tensor {min(absent)}, which the index promises",
                              "model.path", "download it and the index again")


def check_weights(path: str) -> Iterator[UserMistake]:
    """Mistakes in a Megatron-core checkpoint that a run is to begin with, as far as its files' names tell."""
    missing = [name for name in ("metadata.json", ".metadata", "common.pt") if not (Path(path) / name).is_file()]
    if missing:
        yield UserMistake(f"{path} has no {missing[0]}", "model.weights",
                          "give a directory that tools/convert_hf_to_megatron.py made, or a run's checkpoints/step_*")


def _shards(index: Path) -> dict[str, set[str]]:
    """Tensors of each shard, as model.safetensors.index.json has them."""
    shards: dict[str, set[str]] = {}
    for tensor, shard in sorted(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()):
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _tensors(path: Path) -> set[str] | None:
    """Names of the tensors of a safetensors file; None if it is not as long as its header says.

    The format: 8 bytes, the length of the header; the header, JSON with each tensor's place; the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            return None
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return set(header) if 8 + length + end == size else None


def check_prompts(path: str, columns: list[str], key: str, look: Callable[[Rows], Iterator[UserMistake]]
                  ) -> Iterator[UserMistake]:
    """Mistakes in a file of prompts: absent, empty, another format, a bad row, a column missing.

    The rows of a large file are left to the loader, which reads it anyway.

    Args:
        path: JSONL or Parquet.
        columns: that every row must have.
        key: dotted key of the section that names the file ("data.sources.0").
        look: finds mistakes in the rows of a file that is none of these.
    """
    from megarl.data.rows import open_rows  # pure, but above this package

    try:
        if Path(path).is_file() and Path(path).stat().st_size > _READ_BYTES:
            return
        yield from look(open_rows(path, columns, key))
    except UserMistake as mistake:
        yield mistake


def check_run_dir(path: str) -> Iterator[UserMistake]:
    """Whether the run directory is there and writable, or can be made."""
    at = Path(path).absolute()
    while not at.exists():
        at = at.parent
    if not at.is_dir():
        yield UserMistake(f"{at} is a file", "run.dir", "give a directory")
    elif not os.access(at, os.W_OK | os.X_OK):
        yield UserMistake(f"{at} cannot be written to", "run.dir", "give a directory of your own")
