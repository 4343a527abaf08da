"""Tensors packed end to end into buckets, the unit that travels to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Bucket:
    """Tensors of one dtype, end to end.

    Attributes:
        storage: uint8 [capacity]; the first `bytes` are filled.
        dtype: of all tensors.
        names, shapes: of the tensors, in order.
        bytes: filled so far.
    """

    storage: torch.Tensor
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    bytes: int = 0

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may be added."""
        return tensor.dtype == self.dtype and self.bytes + tensor.nbytes <= self.storage.numel()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor in."""
        place = self.storage[self.bytes:self.bytes + tensor.nbytes]
        place.view(self.dtype).copy_(tensor.detach().reshape(-1))
        self.names.append(name)
        self.shapes.append(tuple(tensor.shape))
        self.bytes += tensor.nbytes


def fill(tensors: Iterable[tuple[str, torch.Tensor | None]], max_bytes: int, device: torch.device) -> Iterator[Bucket]:
    """Buckets of at most `max_bytes` (a larger tensor gets one of its own), in the order of `tensors`.

    Two storages take turns: a bucket may be on its way while the next one is filled, but is overwritten by the one
    after that. Each tensor is copied before the next is asked for. Entries whose tensor is None are passed over: there
    this rank only takes part in gathering.

    Args:
        tensors: (name, tensor) pairs.
        max_bytes: capacity of a bucket.
        device: where buckets lie.
    """
    storages: list[torch.Tensor] = []
    bucket: Bucket | None = None
    for name, tensor in tensors:
        if tensor is None:
            continue
        if bucket is not None and not bucket.has_room(tensor):
            yield bucket
            storages.append(bucket.storage)
            bucket = None
        if bucket is None:
            storage = storages.pop(0) if len(storages) > 1 else torch.empty(0, dtype=torch.uint8, device=device)
            if storage.numel() < tensor.nbytes:
                storage = torch.empty(max(max_bytes, tensor.nbytes), dtype=torch.uint8, device=device)
            bucket = Bucket(storage[:max(max_bytes, tensor.nbytes)], tensor.dtype)
        bucket.add(name, tensor)
    if bucket is not None:
        yield bucket
