"""Rows of a JSONL or Parquet file by number, each with a name for messages ("train.jsonl line 12")."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.errors import UserMistake


class Rows(Protocol):
    """Random access to the rows of a file; safe to use from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """What to call the row in a message."""
        ...


def open_rows(path: str, columns: list[str], key: str) -> Rows:
    """Open a file of rows that have `columns`; the rest of the row is free.

    Args:
        path: *.jsonl (every line is checked now) or *.parquet (its schema is).
        columns: each must be in every row.
        key: config section that names the file, for messages.
    Raises:
        UserMistake: missing file, other format, no rows, a line that is not a JSON object, a missing column.
    """
    file = Path(path)
    if file.suffix not in (".jsonl", ".parquet"):
        raise UserMistake(f"{path} is neither .jsonl nor .parquet", f"{key}.path", "give one of these")
    if not file.is_file():
        raise UserMistake(f"{path} is not there", f"{key}.path", "give a JSONL or Parquet file")
    rows = JsonlRows(file, columns) if file.suffix == ".jsonl" else ParquetRows(file, columns)
    if not len(rows):
        raise UserMistake(f"{path} has no rows", f"{key}.path", "give a file with one prompt a row")
    return rows


class JsonlRows:
    """One JSON object a line; blank lines are skipped. The file stays on disk, mapped; lines are parsed on access."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        starts, numbers = [], []
        at = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _check_line(line, f"{path} line {number}", columns)
                    starts.append(at)
                    numbers.append(number)
                at += len(line)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if at else b""
        self._starts = np.array([*starts, at], np.int64)
        self._numbers = np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return json.loads(self._map[self._starts[index]:self._starts[index + 1]])

    def where(self, index: int) -> str:
        return f"{self.path} line {self._numbers[index]}"


def _check_line(line: bytes, where: str, columns: list[str]) -> None:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
        raise UserMistake(f"not JSON: {reason}", where, "write one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserMistake("not a JSON object", where, "write one JSON object a line")
    _check_columns(list(row), columns, where)


def _check_columns(present: list[str], wanted: list[str], where: str) -> None:
    for column in wanted:
        if column not in present:
            raise UserMistake(f"no column {column!r}", where,
                              f"its columns are {', '.join(present)}; name the prompt's in `prompt`, the answer's in "
                              "`label` (label: \"\" if there is none)")


class ParquetRows:
    """A Parquet file, read into Arrow memory."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        import pyarrow  # slow to import: only where it is needed
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserMistake(f"not Parquet: {str(error).splitlines()[0]}", str(path), "write it again") from error
        _check_columns(self._table.column_names, columns, str(path))

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self.path} row {index + 1}"
