"""Weights written tensor by tensor, so that no more than one is in memory: safetensors, and Megatron-core's format."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # part of the format: `.metadata` is full of them
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.safetensors_dir import INDEX, SINGLE

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Slot:
    """Room for a tensor in a safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _File:
    """A file that has its name only once it is whole and on the disk."""

    def __init__(self, path: Path) -> None:
        self.path, self._partial = path, path.with_name(f".{path.name}")
        self.file = self._partial.open("wb")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        if kind is None:
            os.replace(self._partial, self.path)


class SafetensorsFile(_File):
    """A safetensors file of these tensors, to be added in any order."""

    def __init__(self, path: Path, slots: Sequence[Slot]) -> None:
        super().__init__(path)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._left: dict[str, tuple[Slot, int]] = {}
        end = 0
        for slot in sorted(slots, key=lambda slot: -slot.dtype.itemsize):  # each begins at a multiple of its elements
            self._left[slot.name] = slot, end
            header[slot.name] = {"dtype": _DTYPES[slot.dtype], "shape": slot.shape,
                                 "data_offsets": [end, end := end + slot.bytes]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = self.file.write(struct.pack("<Q", len(text)) + text)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of any dtype and device."""
        slot, offset = self._left.pop(name)
        if tuple(tensor.shape) != slot.shape:
            raise AssertionError(f"{name} is {tuple(tensor.shape)}, not {slot.shape}")
        raw = tensor.detach().to("cpu", slot.dtype).contiguous().reshape(-1).view(torch.uint8)
        self.file.seek(self._start + offset)
        self.file.write(memoryview(raw.numpy()))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None and self._left:
            raise AssertionError(f"{self.path.name}: {min(self._left)} was not written")
        super().__exit__(kind, *rest)


Files = list[tuple[str, list[Slot]]]


def plan_files(groups: Sequence[Sequence[Slot]], shard_bytes: int) -> list[Files]:
    """Which tensors go to which file: for each group, its files (name, tensors in their order).

    A file holds tensors of one group only, at most `shard_bytes` of them unless one tensor alone is larger.
    """
    planned: list[list[list[Slot]]] = []
    for group in groups:
        planned.append([])
        filled = shard_bytes
        for slot in group:
            if filled + slot.bytes > shard_bytes:
                planned[-1].append([])
                filled = 0
            planned[-1][-1].append(slot)
            filled += slot.bytes
    count = sum(map(len, planned))
    names = iter([SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)])
    return [[(next(names), slots) for slots in group] for group in planned]


def write_files(folder: Path, files: Files, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write files of tensors that come file by file, each as it comes."""
    for name, slots in files:
        with SafetensorsFile(folder / name, slots) as out:
            for _ in slots:
                out.add(*next(tensors))


def write_index(folder: Path, files: Files) -> None:
    """The index of all files, if there is more than one."""
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(slot.bytes for _, slots in files for slot in slots)},
                 "weight_map": dict(sorted((slot.name, name) for name, slots in files for slot in slots))}
        with _File(folder / INDEX) as out:
            out.file.write((json.dumps(index, indent=2) + "\n").encode())


@dataclass(frozen=True)
class Box:
    """A part of a global tensor of a Megatron-core checkpoint."""

    key: str
    size: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


Written = list[tuple[Box, WriteResult]]


class BoxFile(_File):
    """One rank's boxes.

    Attributes:
        written: what `finish` needs of each rank.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: Written = []

    def add(self, box: Box, tensor: torch.Tensor) -> None:
        """Append a box; `tensor` may leave out first dimensions of size 1."""
        start = self.file.tell()
        whole = tensor.to(box.dtype).reshape(box.sizes)
        if whole.untyped_storage().nbytes() != whole.nbytes:  # torch.save would write all that it is a view of
            whole = whole.clone()
        torch.save(whole, self.file)
        length = self.file.tell() - start
        self.written.append((box, WriteResult(MetadataIndex(box.key, torch.Size(box.offsets)), length,
                                              _StorageInfo(self.path.name, start, length))))


def finish(directory: Path, written: Sequence[Written], common: dict[str, Any]) -> None:
    """Write what makes the files of all ranks a Megatron-core checkpoint: the index, the rest, and last the mark."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for box in (box for rank in written for box, _ in rank):
        found = tensors.setdefault(box.key, TensorStorageMetadata(
            TensorProperties(dtype=box.dtype), torch.Size(box.size), []))
        found.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    FileSystemWriter(directory).finish(Metadata(tensors), [[result for _, result in rank] for rank in written])
    with _File(directory / "common.pt") as out:
        torch.save(common, out.file)
    with _File(directory / "metadata.json") as out:
        out.file.write(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                                   "common_backend": "torch", "common_backend_version": 1}).encode())
