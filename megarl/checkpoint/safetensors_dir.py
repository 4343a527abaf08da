"""The safetensors files of a Hugging Face checkpoint directory, read tensor by tensor and slice by slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import UserMistake
from megarl.model.families import tables
from megarl.model.hf_config import HFConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsDir:
    """Tensors by name; files are opened when first needed and stay open (memory-mapped)."""

    def __init__(self, path: str | Path) -> None:
        """Read the index (or the single file's header).

        Raises:
            UserMistake: neither is there, or the index is not one.
        """
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        index = self.path / INDEX
        if index.exists():
            try:
                self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError) as error:
                raise UserMistake(f"not a safetensors index: {error!r}", str(index), "fetch the file again") from None
        elif (self.path / SINGLE).exists():
            self.files = {}
            self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise UserMistake(f"neither {SINGLE} nor {INDEX} is there", str(self.path),
                              "model.path must be a checkpoint in safetensors format")

    def _file(self, name: str, tensor: str = "") -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, framework="pt")
            except FileNotFoundError:
                raise UserMistake(f"the file is missing; tensor {tensor} should be in it", str(self.path / name),
                                  "complete the download") from None
            except SafetensorError as error:
                raise UserMistake(f"the file is damaged: {error}", str(self.path / name), "fetch it again") from None
        return self._open[name]

    def _entry(self, name: str) -> Any:
        if name not in self.files:
            raise UserMistake(f"tensor {name} is missing", str(self.path),
                              "the checkpoint does not fit its config.json, or is incomplete")
        file = self.files[name]
        try:
            return self._file(file, name).get_slice(name)
        except SafetensorError:
            raise UserMistake(f"tensor {name} is missing", str(self.path / file),
                              "the index names this file for it; fetch both again") from None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        entry = self._entry(name)
        if entry.get_dtype() not in _DTYPES:
            raise UserMistake(f"tensor {name} is stored as {entry.get_dtype()}", str(self.path / self.files[name]),
                              "use an unquantised checkpoint")
        return _DTYPES[entry.get_dtype()]

    def read(self, name: str, shape: tuple[int, ...], dim: int | None = None, start: int = 0,
             stop: int = 0) -> torch.Tensor:
        """A tensor, or [start, stop) of its dimension `dim`; only that part is read.

        Raises:
            UserMistake: it (or its file) is missing or its shape is not `shape`.
        """
        self.dtype(name)
        entry = self._entry(name)
        if tuple(entry.get_shape()) != shape:
            raise UserMistake(f"tensor {name} is {tuple(entry.get_shape())}, config.json says {shape}",
                              str(self.path / self.files[name]), "the checkpoint does not fit its config.json")
        if dim is None:
            return entry[:]
        if start == stop:  # beyond the vocabulary: all padding
            return torch.empty(*shape[:dim], 0, *shape[dim + 1:], dtype=self.dtype(name))
        return entry[start:stop] if dim == 0 else entry[:, start:stop]

    def refuse_unknown(self, hf: HFConfig) -> None:
        """A tensor that the family has no place for would be left out of training without a word.

        Raises:
            UserMistake: names the tensor and its file.
        """
        known = {tensor.name for tensor in tables.hf_tensors(hf)}
        if hf.tied:
            known.add("lm_head.weight")  # a second copy of the embedding
        for name, file in self.files.items():
            if name not in known and not name.endswith(".rotary_emb.inv_freq"):
                raise UserMistake(f"tensor {name} has no place in a {hf.family} model", str(self.path / file),
                                  "the checkpoint has a feature that megarl does not know, or another config.json")
