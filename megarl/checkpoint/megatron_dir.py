"""The weights in a Megatron-core checkpoint by their Hugging Face names, slice by slice, without Megatron-core.

Its format, torch_dist, is that of torch.distributed.checkpoint: a global tensor is a set of boxes, and `.metadata` says
which file has each. How the tensors are named and laid out follows from the family's name table:

    decoder.layers.{n}.x   one tensor decoder.layers.x for all layers, its first dimension counts them; in a model whose
                           layers differ each has tensors of its own.
    experts                mlp.experts.experts.x for all experts of a layer (or of all layers), one more dimension.
    gate and up            all rows of gate above all rows of up, however many ranks had shares of both.
    q, k, v                by key/value head, as in `tables`; padding of heads and of a vocabulary comes last.

So a whole tensor can be read whatever layout it was saved from, and no more than it takes memory at a time.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from megarl.checkpoint import files
from megarl.errors import UserMistake
from megarl.model.families import tables
from megarl.model.families.tables import Entry, Table
from megarl.model.hf_config import HFConfig

MARK = "metadata.json"  # Megatron-core's mark of a checkpoint
COMMON = "common.pt"  # what is no tensor
BESIDE = "beside."  # keys of tensors that a conversion keeps and training has no place for
_NOT_THE_MODEL = ("dtype", "max_positions", "eos_ids", "raw", "path")  # fields of HFConfig
# what reading a damaged file raises; of a pickle with a flipped bit, the last four too
_BROKEN = (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError, TypeError, AttributeError,
           ImportError, MemoryError)


def is_megatron(path: str | Path) -> bool:
    """Whether a directory has a Megatron-core checkpoint."""
    return (Path(path) / MARK).is_file()


@dataclass(frozen=True)
class Place:
    """Where a Megatron parameter is: a global tensor, and the indices of its first dimensions (layer, expert)."""

    key: str
    at: tuple[int, ...] = ()


def place(entry: Entry, layer: int, expert: int, stacked: bool) -> Place:
    """Where the parameter of a layer and expert of the model is; `stacked`: layers are all of one kind."""
    key, at = entry.megatron, ()
    if "{layer}" in key:
        key, at = (key.replace(".{layer}", ""), (layer,)) if stacked else (key.replace("{layer}", str(layer)), ())
    if entry.expert:
        key = key.replace("experts.local_experts.{expert}.", "experts.experts.")  # local
        key = key.replace("experts.linear", "experts.experts.linear").replace("{expert}", "") if (
            "{expert}" in key) else key  # Transformer Engine
        at = (*at, expert)
    return Place(key, at)


def common_state(path: str | Path) -> dict[str, Any]:
    """What a checkpoint holds that is no tensor.

    Raises:
        UserMistake: it is no checkpoint, or damaged.
    """
    if not is_megatron(path):
        raise UserMistake(f"no {MARK} is there", str(path), "give the directory of a Megatron-core checkpoint")
    try:
        return torch.load(Path(path) / COMMON, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        raise damaged(path, f"{COMMON}: {_first_line(error)}") from None


def stored_model(path: str | Path, common: dict[str, Any] | None = None) -> HFConfig:
    """The model that a checkpoint of megarl is of.

    Raises:
        UserMistake: it is no checkpoint of megarl, or of an unknown family.
    """
    found = (common_state(path) if common is None else common).get("identity")
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise UserMistake("it does not say which model it is of", str(path), "only checkpoints that megarl has written "
                          "can be read: of a run, or by tools/convert_hf_to_megatron.py")
    return HFConfig.of(found["model"], path=str(path))


def damaged(path: str | Path, why: str) -> UserMistake:
    """Told of a checkpoint that cannot be read."""
    return UserMistake(f"the checkpoint is damaged: {why}", str(path), "take another one, or make it again")


class MegatronDir:
    """Weights by Hugging Face name, as `SafetensorsDir` gives them.

    Args:
        path: of the checkpoint.
        hf: of the model that is wanted.

    Attributes:
        tensors: Megatron-core's key -> size, dtype and boxes, of all that the checkpoint holds (optimizer included).
        beside: names of tensors that came with the model and are not trained.
        implementation: of the layers that were saved; names differ.
    """

    def __init__(self, path: str | Path, hf: HFConfig) -> None:
        """Read the index.

        Raises:
            UserMistake: no checkpoint, a damaged one, or one of another model (the first difference is named).
        """
        self.path, self.hf = Path(path), hf
        refuse_another(stored_model(path), hf, path)
        self.tensors, self._reader = read_index(path)
        self.beside = [key.removeprefix(BESIDE) for key in self.tensors if key.startswith(BESIDE)]
        self._stacked = not any(key.startswith("decoder.layers.0.") for key in self.tensors)
        self.implementation, table = self._table()
        self._entries = {tensor.at(layer, expert): (entry, number, place(entry, layer, expert, self._stacked))
                         for entry, layer, expert in walk(table, hf) for number, tensor in enumerate(entry.hf)}
        self._boxes: dict[str, dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}
        self._kept: tuple[Any, torch.Tensor] | None = None

    def _table(self) -> tuple[tables.Implementation, Table]:
        """The name table by which the checkpoint was written."""
        missing = ""
        for implementation in ("local", "transformer_engine"):
            table = tables.table(self.hf, implementation)
            keys = {place(entry, layer, expert, self._stacked).key for entry, layer, expert in walk(table, self.hf)}
            if not (absent := keys - self.tensors.keys()):
                return implementation, table
            missing = missing or min(absent)
        raise damaged(self.path, f"{missing} is missing")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        return self.tensors[self._key(name)].properties.dtype

    def _key(self, name: str) -> str:
        return self._entries[name][2].key if name in self._entries else f"{BESIDE}{name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `beside`."""
        return tuple(self.tensors[f"{BESIDE}{name}"].size)

    def read(self, name: str, shape: tuple[int, ...], dim: int | None = None, start: int = 0,
             stop: int = 0) -> torch.Tensor:
        """A tensor, or [start, stop) of its dimension `dim`; of a q, k or v, whole heads.

        Raises:
            UserMistake: it is of another shape, or cannot be read.
        """
        low, high = [0] * len(shape), list(shape)
        if dim is not None:
            low[dim], high[dim] = start, stop
        if name not in self._entries:
            return self._box(Place(f"{BESIDE}{name}"), low, high)
        entry, number, where = self._entries[name]
        self._check_size(entry, where)
        if 0 in (b - a for a, b in zip(low, high, strict=True)):
            return torch.empty([b - a for a, b in zip(low, high, strict=True)], dtype=self.dtype(name))
        if entry.kind == "qkv":
            return self._heads(entry, number, where, low, high)
        if entry.kind == "gate_up" and number:
            low[0], high[0] = low[0] + shape[0], high[0] + shape[0]
        return self._box(where, low, high)

    def close(self) -> None:
        """Nothing stays open; as of `SafetensorsDir`."""

    def _check_size(self, entry: Entry, where: Place) -> None:
        """Refuse a parameter that is smaller than the model's, or larger where there is no padding."""
        counts = ((self.hf.layers,) if "{layer}" in entry.megatron and self._stacked else ()) + (
            (self.hf.experts,) if entry.expert else ())
        wanted, found = (*counts, *whole_shape(entry)), tuple(self.tensors[where.key].size)
        padded = entry.kind == "vocab" or entry.groups
        if len(found) != len(wanted) or any(f < w if padded else f != w for f, w in zip(found, wanted, strict=True)):
            raise UserMistake(f"{where.key} is {found}, the model's config.json says {wanted}", str(self.path),
                              "the checkpoint is of another model")

    def _heads(self, entry: Entry, number: int, where: Place, low: list[int], high: list[int]) -> torch.Tensor:
        """Rows of q, k or v; the fused parameter's part that they are in is kept for the other two."""
        hf = self.hf
        rows = (hf.heads // hf.kv_heads * hf.head_dim, hf.head_dim, hf.head_dim)
        first, last = low[0] // rows[number], high[0] // rows[number]
        if self._kept is None or self._kept[0] != (where, first, last):
            self._kept = None
            fused = self._box(where, [first * sum(rows), *low[1:]], [last * sum(rows), *high[1:]])
            self._kept = (where, first, last), fused
        return self._kept[1].unflatten(0, (-1, sum(rows))).split(rows, 1)[number].flatten(0, 1)

    def _box(self, where: Place, low: list[int], high: list[int]) -> torch.Tensor:
        """[low, high) of a parameter, as a tensor of its own."""
        low, high = [*where.at, *low], [*(i + 1 for i in where.at), *high]
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        out, items, filled = torch.empty(sizes, dtype=self.tensors[where.key].properties.dtype), [], 0
        for offsets, lengths in self._boxes_at(where):
            start = [max(a, o) for a, o in zip(low, offsets, strict=True)]
            common = [min(b, o + n) - s for b, o, n, s in zip(high, offsets, lengths, start, strict=True)]
            if min(common, default=1) <= 0:
                continue
            filled += torch.Size(common).numel()
            items.append(ReadItem(
                LoadItemType.TENSOR, MetadataIndex(where.key), _minus(start, low),
                MetadataIndex(where.key, torch.Size(offsets)), _minus(start, offsets), torch.Size(common)))
        if filled != out.numel():
            raise damaged(self.path, f"{where.key} is incomplete")
        try:
            self._reader.read_data(LoadPlan(items), _Into(out))
        except _BROKEN as error:
            raise damaged(self.path, f"{where.key}: {_first_line(error)}") from None
        return out.reshape(sizes[len(where.at):])

    def _boxes_at(self, where: Place) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, sizes) of the stored boxes with these first indices."""
        if where.key not in self._boxes:
            found = self._boxes[where.key] = defaultdict(list)
            for chunk in self.tensors[where.key].chunks:
                found[tuple(chunk.offsets)[:len(where.at)]].append((tuple(chunk.offsets), tuple(chunk.sizes)))
        return self._boxes[where.key][where.at]


class _Into(DefaultLoadPlanner):
    """Has boxes copied into one tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._out
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("no bytes were asked for")


def walk(table: Table, hf: HFConfig) -> Iterator[tuple[Entry, int, int]]:
    """All parameters of the model: (entry, layer, expert), numbers of the model; in the order of `hf_tensors`."""
    yield from ((entry, 0, 0) for entry in table.embedding)
    for layer in range(hf.layers):
        for entry in table.entries(layer):
            yield from ((entry, layer, expert) for expert in range(hf.experts if entry.expert else 1))
    yield from ((entry, 0, 0) for entry in (*table.norm, *table.head))


def whole_shape(entry: Entry) -> tuple[int, ...]:
    """Of a parameter that is on one rank, without padding."""
    first = entry.hf[0].shape
    return (sum(tensor.shape[0] for tensor in entry.hf), *first[1:])


def read_index(path: str | Path) -> tuple[dict[str, TensorStorageMetadata], FileSystemReader]:
    """What tensors a checkpoint holds, and a reader for them.

    Raises:
        UserMistake: the index cannot be read, or a file is missing or shorter than it says.
    """
    reader = FileSystemReader(Path(path))
    if (Path(path) / files.CHECKSUMS).is_file():  # a flipped bit can make anything of a pickle
        with suppress(OSError, ValueError, KeyError):  # of the checksums, told by who compares all files
            if why := files.damage(Path(path), [".metadata"], files.expected(Path(path))):
                raise damaged(path, why)
    try:
        index = reader.read_metadata()
        reader.set_up_storage_reader(index, is_coordinator=True)
        ends: dict[str, int] = defaultdict(int)
        for stored in index.storage_data.values():
            ends[stored.relative_path] = max(ends[stored.relative_path], stored.offset + stored.length)
        tensors = {key: found for key, found in index.state_dict_metadata.items()
                   if isinstance(found, TensorStorageMetadata)}
    except _BROKEN as error:
        raise damaged(path, f".metadata: {_first_line(error)}") from None
    for name, end in sorted(ends.items()):
        file = Path(path) / name
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        if file.stat().st_size < end:
            raise damaged(path, f"{name} has {file.stat().st_size} bytes of {end}")
    return tensors, reader


def refuse_another(stored: HFConfig, wanted: HFConfig, path: str | Path) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserMistake: names the first difference.
    """
    for field in fields(HFConfig):
        mine, theirs = getattr(wanted, field.name), getattr(stored, field.name)
        if field.name not in _NOT_THE_MODEL and mine != theirs:
            raise UserMistake(f"its model has {field.name} {theirs}, {wanted.path or 'config.json'} says {mine}",
                              str(path), "take a checkpoint of the same model")


def _minus(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    return torch.Size(x - y for x, y in zip(a, b, strict=True))


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
