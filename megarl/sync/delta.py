"""What changed between two versions of the weights, losslessly and small. Pure: torch and numpy.

A step at a small learning rate leaves most bf16 weights as they were (the update is below half of their last place),
and moves the others to a neighbour. So a tensor travels as the gaps between its changed elements and the differences
of their bits, both as byte planes (all lowest bytes, then all next ones) that zlib then shortens. Bits are compared,
not values: -0.0 is not 0.0, and a NaN equals itself.

A message is a length, a JSON header that names its tensors, and their bytes. Every tensor of a version is named in
some message, also one that did not change, so that whoever receives them can tell that all have come.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

LEVEL = 1  # of zlib; 6 takes three times as long for some percent
_LENGTH = struct.Struct("<Q")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = (np.uint8, np.uint16, np.uint32, np.uint64)


@dataclass(frozen=True)
class Change:
    """How to make one tensor of the new version.

    Attributes:
        name, dtype, shape: of the tensor; dtype as `bfloat16`.
        kind: same: nothing to do; sparse: `parts` are packed gaps and differences; whole: `parts` is its bytes.
        parts: what travels.
        count: changed elements (of a whole one: all).
        gap_bytes: bytes of one gap before packing; 0 if not sparse.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["same", "sparse", "whole"]
    parts: tuple[bytes | memoryview, ...] = ()
    count: int = 0
    gap_bytes: int = 0

    @property
    def bytes(self) -> int:
        """That travel, without the header."""
        return sum(len(part) for part in self.parts)


def whole(name: str, tensor: torch.Tensor) -> Change:
    """All of a contiguous tensor on CPU; refers to its memory, does not copy it."""
    raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    return Change(name, _name(tensor.dtype), tuple(tensor.shape), "whole", (raw,), tensor.numel())


def compare(name: str, new: torch.Tensor, old: torch.Tensor) -> Change:
    """What makes `new` of `old`; both contiguous, on CPU, of one shape and dtype.

    Whole where that is no more to send; it then refers to `new`'s memory.
    """
    new_bits, old_bits = (_bits(tensor).numpy() for tensor in (new, old))
    places = np.flatnonzero(new_bits != old_bits)
    if not len(places):
        return Change(name, _name(new.dtype), tuple(new.shape), "same")
    if 2 * len(places) > new_bits.size:
        return whole(name, new)
    gaps = np.diff(places, prepend=-1) - 1
    kind = next(kind for kind in _GAPS if gaps.max() <= np.iinfo(kind).max)
    steps = new_bits[places] - old_bits[places]  # wraps, and so does the way back
    folded = (steps << 1) ^ (steps >> (8 * steps.itemsize - 1))  # -1, 1, -2 -> 1, 2, 3: high bytes are mostly 0
    parts = (_pack(gaps.astype(kind)), _pack(folded))
    change = Change(name, _name(new.dtype), tuple(new.shape), "sparse", parts, len(places), np.dtype(kind).itemsize)
    return change if change.bytes < new.nbytes else whole(name, new)


def apply(change: Change, target: torch.Tensor) -> None:
    """Make the new version in place, of the old one where the change is sparse.

    Args:
        change: of this tensor.
        target: of any strides; for a sparse change of the same dtype.
    Raises:
        ValueError: the change does not fit the tensor, or its bytes are damaged.
    """
    if change.shape != tuple(target.shape):
        raise ValueError(f"{change.name} has shape {list(change.shape)}, expected {list(target.shape)}")
    if change.kind == "whole":
        (raw,) = change.parts
        dtype = dtype_of(change)
        if len(raw) != math.prod(change.shape) * dtype.itemsize:
            raise ValueError(f"{change.name}: {len(raw)} bytes for {list(change.shape)} of {change.dtype}")
        target.copy_(torch.frombuffer(bytearray(raw), dtype=dtype).view(change.shape))
    elif change.kind == "sparse":
        if _name(target.dtype) != change.dtype:
            raise ValueError(f"{change.name} is held in {_name(target.dtype)}, what changed is in {change.dtype}")
        changed = target.detach().clone(memory_format=torch.contiguous_format)
        bits = _bits(changed).numpy()
        places, steps = _unfold(change, bits.dtype)
        if len(places) and places[-1] >= bits.size:
            raise ValueError(f"{change.name}: a change at element {places[-1]} of {bits.size}")
        bits[places] += steps
        target.copy_(changed)


def _unfold(change: Change, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(places, differences of bits) of a sparse change."""
    packed_gaps, packed_steps = change.parts
    gaps = _unpack(packed_gaps, np.dtype(f"<u{change.gap_bytes}"), change)
    folded = _unpack(packed_steps, dtype, change)
    unsigned = folded.view(f"<u{dtype.itemsize}")
    steps = (unsigned >> np.array(1, unsigned.dtype)).view(dtype) ^ -(folded & np.array(1, dtype))
    return np.cumsum(gaps.astype(np.int64) + 1) - 1, steps


def _pack(values: np.ndarray) -> bytes:
    return zlib.compress(np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T), LEVEL)


def _unpack(packed: bytes | memoryview, dtype: np.dtype, change: Change) -> np.ndarray:
    try:
        planes = np.frombuffer(zlib.decompress(packed), np.uint8)
    except zlib.error as error:
        raise ValueError(f"{change.name}: {error}") from error
    if planes.size != change.count * dtype.itemsize:
        raise ValueError(f"{change.name}: {planes.size} bytes for {change.count} changes")
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, change.count).T).view(dtype).reshape(-1)


def messages(changes: Iterable[Change], base: str | None, max_bytes: int) -> Iterator[bytes]:
    """Messages of at most `max_bytes` (a larger change gets one of its own).

    Args:
        changes: of a version, in any order.
        base: the version that they start from; None if all are whole.
    """
    waiting: list[Change] = []
    for change in changes:
        if waiting and sum(other.bytes for other in waiting) + change.bytes > max_bytes:
            yield _message(waiting, base)
            waiting = []
        waiting.append(change)
    if waiting:
        yield _message(waiting, base)


def _message(changes: list[Change], base: str | None) -> bytes:
    tensors = [{"name": change.name, "dtype": change.dtype, "shape": change.shape, "kind": change.kind,
                "parts": [len(part) for part in change.parts], "count": change.count, "gap_bytes": change.gap_bytes}
               for change in changes]
    header = json.dumps({"base": base, "tensors": tensors}).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(part for change in changes for part in change.parts)])


def read_message(raw: bytes) -> tuple[str | None, list[Change]]:
    """(base, changes) of a message; the changes refer to `raw`.

    Raises:
        ValueError: it is none, or was cut short.
    """
    try:
        (length,) = _LENGTH.unpack_from(raw)
        header = json.loads(raw[_LENGTH.size:_LENGTH.size + length])
        base, at, found = header["base"], _LENGTH.size + length, []
        for entry in header["tensors"]:
            ends = np.cumsum([at, *entry["parts"]]).tolist()
            parts = tuple(memoryview(raw)[start:end] for start, end in zip(ends, ends[1:], strict=False))
            at = ends[-1]
            found.append(Change(entry["name"], entry["dtype"], tuple(entry["shape"]), entry["kind"], parts,
                                entry["count"], entry["gap_bytes"]))
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no message of changed weights: {error!r}") from error
    if at != len(raw):
        raise ValueError(f"a message of {at} bytes, {len(raw)} came")
    if base is None and any(change.kind != "whole" for change in found):
        raise ValueError("changes without the version that they start from")
    return base, found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, [elements], of the same memory."""
    return tensor.reshape(-1).view(_BITS[tensor.dtype.itemsize])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(change: Change) -> torch.dtype:
    """The dtype of the tensor; ValueError if there is none of that name."""
    found = getattr(torch, change.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {change.dtype!r}")
    return found
