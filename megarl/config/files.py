"""Checks of the files that a config names: the model's directory, prompt files, the run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserMistake

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ROWS_READ = 1000  # of each JSONL file; the loader reads the rest


def check_model_files(path: str) -> Iterator[UserMistake]:
    """Mistakes in a Hugging Face checkpoint directory: shards missing or cut short, no tokenizer.

    config.json is not judged here (`model.hf_config` does it).
    """
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
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
    for shard in shards:
        if shard not in missing and not _whole(directory / shard):
            yield UserMistake(f"{directory / shard} is cut short or no safetensors file", "model.path",
                              "download it again")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        yield UserMistake(f"{directory} has no tokenizer", "model.path", f"it needs one of {', '.join(_TOKENIZERS)}")


def _whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says (8 bytes of length, the header, the tensors)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            return 8 + length + max((entry["data_offsets"][1] for name, entry in header.items()
                                     if name != "__metadata__"), default=0) == size
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False


def check_prompts(path: str, column: str, key: str) -> Iterator[UserMistake]:
    """Mistakes in a file of prompts: absent, empty, another format, a bad row, no such column.

    Args:
        path: JSONL (its first rows are read) or Parquet (its schema is read).
        column: that holds the prompt.
        key: dotted key of the section that names the file ("data.sources.0").
    """
    file = Path(path)
    where, wanted = f"{key}.path", "give a JSONL or Parquet file with one prompt a row"
    if file.suffix not in (".jsonl", ".parquet"):
        yield UserMistake(f"{path} is neither .jsonl nor .parquet", where, wanted)
    elif not file.is_file():
        yield UserMistake(f"{path} is not there", where, wanted)
    elif file.stat().st_size == 0:
        yield UserMistake(f"{path} is empty", where, wanted)
    elif file.suffix == ".jsonl":
        yield from _check_jsonl(file, column, key)
    else:
        yield from _check_parquet(file, column, key)


def _check_jsonl(file: Path, column: str, key: str) -> Iterator[UserMistake]:
    rows, where = 0, f"{key}.path"
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number > _ROWS_READ:
                return
            if not line.strip():
                continue
            rows += 1
            try:
                row = json.loads(line)
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
                yield UserMistake(f"{file} line {number} is not JSON: {reason}", where, "write one JSON object a line")
                return
            if not isinstance(row, dict):
                yield UserMistake(f"{file} line {number} is not a JSON object", where, "write one JSON object a line")
                return
            if column not in row:
                yield UserMistake(f"{file} line {number} has no column {column!r}", f"{key}.prompt",
                                  f"its columns are {', '.join(map(str, row))}")
                return
    if not rows:
        yield UserMistake(f"{file} has no rows", where, "write one JSON object a line")


def _check_parquet(file: Path, column: str, key: str) -> Iterator[UserMistake]:
    import pyarrow  # slow to import: only where a config names such a file
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError) as error:
        yield UserMistake(f"{file} is not Parquet: {str(error).splitlines()[0]}", f"{key}.path", "write it again")
        return
    columns = metadata.schema.to_arrow_schema().names
    if not metadata.num_rows:
        yield UserMistake(f"{file} has no rows", f"{key}.path", "give a file with one prompt a row")
    elif column not in columns:
        yield UserMistake(f"{file} has no column {column!r}", f"{key}.prompt", f"its columns are {', '.join(columns)}")


def check_run_dir(path: str) -> Iterator[UserMistake]:
    """Whether the run directory is there and writable, or can be made."""
    at = Path(path).absolute()
    while not at.exists():
        at = at.parent
    if not at.is_dir():
        yield UserMistake(f"{at} is a file", "run.dir", "give a directory")
    elif not os.access(at, os.W_OK | os.X_OK):
        yield UserMistake(f"{at} cannot be written to", "run.dir", "give a directory of your own")
