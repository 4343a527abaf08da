"""The safetensors files of a Hugging Face checkpoint directory, read tensor by tensor and slice by slice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import UserMistake
from megarl.model.families import tables
from megarl.model.hf_config import HFConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 1 << 12  # that are compared at a time
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".index.json", "metadata.json",
                 "checksums.json")
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
                self.files = {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserMistake(f"not a safetensors index: {error!r}", str(index), "fetch the file again") from None
        elif (self.path / SINGLE).exists():
            self.files: dict[str, str] = {}
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

    def close(self) -> None:
        """Forget the open files, and with them what was read of them and is in memory still; they open again."""
        self._open.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._entry(name).get_shape())

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
        self.refuse_another_shape(name, shape)
        entry = self._entry(name)
        if dim is None:
            return entry[:]
        if start == stop:  # beyond the vocabulary: all padding
            return torch.empty(*shape[:dim], 0, *shape[dim + 1:], dtype=self.dtype(name))
        return entry[start:stop] if dim == 0 else entry[:, start:stop]

    def beside(self, hf: HFConfig) -> list[str]:
        """Tensors that the family leaves out of training and a conversion keeps, in the order of their names."""
        return sorted(name for name in self.files if tables.is_beside(name, hf))

    def refuse_unknown(self, hf: HFConfig) -> None:
        """A tensor that the family has no place for would be left out of training without a word.

        Raises:
            UserMistake: names the tensor and its file; also of a head that differs from the embeddings it is tied to.
        """
        known = {tensor.name for tensor in tables.hf_tensors(hf)}
        if hf.tied:
            known.add(HEAD)
            self._refuse_another_head()
        for name, file in self.files.items():
            if name not in known and not name.endswith(".rotary_emb.inv_freq") and not tables.is_beside(name, hf):
                raise UserMistake(f"tensor {name} has no place in a {hf.family} model", str(self.path / file),
                                  "the checkpoint has a feature that megarl does not know, or another config.json")

    def _refuse_another_head(self) -> None:
        """A head that is stored beside tied embeddings must be their copy."""
        if HEAD not in self.files or EMBEDDING not in self.files:
            return
        (rows, *_), same = self.shape(EMBEDDING), self.shape(HEAD) == self.shape(EMBEDDING)
        for row in range(0, rows if same else 0, _ROWS):
            head, embedding = (self._entry(name)[row:row + _ROWS] for name in (HEAD, EMBEDDING))
            same = same and torch.equal(head.float(), embedding.float())
        if not same:
            raise UserMistake(f"{HEAD} is not {EMBEDDING}, and config.json says tie_word_embeddings",
                              str(self.path / self.files[HEAD]),
                              "set tie_word_embeddings to false, or take the tensor out")

    def check(self, hf: HFConfig) -> None:
        """Look at all files and what they say of their tensors, before anything is done with them.

        Raises:
            UserMistake: a file is missing or damaged, a tensor missing, unknown, or of another shape than the config
                says.
        """
        self.refuse_unknown(hf)
        for tensor in tables.hf_tensors(hf):
            self.refuse_another_shape(tensor.name, tensor.shape)
        self.close()

    def refuse_another_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that the config does not describe.

        Raises:
            UserMistake: it (or its file) is missing, or its shape is not `shape`.
        """
        self.dtype(name)
        if self.shape(name) != shape:
            raise UserMistake(f"tensor {name} is {self.shape(name)}, config.json says {shape}",
                              str(self.path / self.files[name]), "the checkpoint does not fit its config.json")


def has_weights(path: str | Path) -> bool:
    """Whether a directory has safetensors with the names of a checkpoint."""
    return any((Path(path) / name).is_file() for name in (INDEX, SINGLE))


def carry_over(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat template and whatever else lies beside the weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
