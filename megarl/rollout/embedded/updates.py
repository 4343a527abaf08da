"""New weights for a running engine: over process groups, from disk or as changes, all of them or not serving."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.rollout.embedded.weights import Weights
from megarl.sync import delta


class UpdateRefused(Exception):
    """What was asked cannot be done; the message goes into the answer with `success: false`."""


class WeightUpdater:
    """The weights' side of the update protocol. Used from the engine's thread only.

    Args:
        weights: written in place.
        timeout_s: of joining a group and of each broadcast.

    Attributes:
        open: between begin and end.
        torn: weights were overwritten in part, or a load failed: the engine must not serve until a whole update. Any
            tensor that is written sets it, the end of an update that brought them all clears it.
    """

    def __init__(self, weights: Weights, timeout_s: float) -> None:
        self._weights, self._timeout = weights, timedelta(seconds=timeout_s)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._missing: set[str] = set()
        self._may_patch = False
        self.open = False
        self.torn = False

    @property
    def serving(self) -> bool:
        """Whether the weights are one whole version."""
        return not (self.open or self.torn)

    def init_group(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join a group of `world_size` ranks whose rank 0 hosts a TCPStore at address:port.

        The same keys as SGLang's init_custom_process_group: the store, then a prefix of the group's name.

        Raises:
            UpdateRefused: the name is in use, another backend, or the group did not come about in time.
        """
        if name in self._groups:
            raise UpdateRefused(f"The group name {name} has already been created.")
        if backend != "gloo":
            raise UpdateRefused(f"backend {backend} is not supported by the embedded engine, use gloo")
        if not 0 < rank < world_size:
            raise UpdateRefused(f"rank {rank} in a group of {world_size}: an engine's rank is 1 or more")
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=self._timeout)
            group, _ = dist.distributed_c10d._new_process_group_helper(
                world_size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name,
                timeout=self._timeout)
        except (RuntimeError, ValueError) as error:  # DistError and gloo's own are RuntimeErrors
            raise UpdateRefused(f"Failed to initialize the group {name}: {error}") from error
        dist.distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
        self._groups[name] = group

    def destroy_group(self, name: str) -> None:
        """Leave a group. Raises UpdateRefused if there is none of this name."""
        if name not in self._groups:
            raise UpdateRefused(f"The group {name} to be destroyed does not exist.")
        dist.destroy_process_group(self._groups.pop(name))

    def begin(self) -> None:
        """Open an update: from here to `end` the engine does not serve."""
        if self.open:
            raise UpdateRefused("A weight update is already open.")
        self.open, self._missing, self._may_patch = True, set(self._weights.views), not self.torn

    def end(self) -> None:
        """Close the update. Every tensor must have come, or none at all.

        Raises:
            UpdateRefused: none is open, or tensors are missing: the update is closed all the same, and the engine
                serves again after a later one that is whole.
        """
        if not self.open:
            raise UpdateRefused("No weight update is open.")
        self.open = False
        if self._missing and (self.torn or len(self._missing) < len(self._weights.views)):
            self.torn = True
            raise UpdateRefused(f"{len(self._missing)} of {len(self._weights.views)} tensors were not sent, among them "
                                f"{min(self._missing)}; the engine serves again after a whole update")
        self.torn = False
        self._weights.refresh()

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str,
                load_format: str | None) -> None:
        """Take part in the broadcasts of one bucket and load its tensors.

        Tensors that do not fit are received as well, so that the sender is not left waiting, and refused afterwards.

        Raises:
            UpdateRefused: no update is open, no such group, a malformed request, a broadcast that failed, or a tensor
                that does not fit.
        """
        if not self.open:
            raise UpdateRefused("Weight updates must run between begin_weight_update() and end_weight_update().")
        if group_name not in self._groups:
            raise UpdateRefused(f"Group {group_name} not in the groups: initialise it first.")
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateRefused("names, dtypes and shapes must have equal lengths")
        if load_format not in (None, "flattened_bucket"):
            raise UpdateRefused(f"load_format {load_format!r} is not supported by the embedded engine")
        types = [_dtype(name) for name in dtypes]
        try:
            tensors = (self._receive_flat if load_format else self._receive_each)(types, shapes, group_name)
        except RuntimeError as error:  # gloo reports a lost peer or a timeout as one
            self.torn = True
            raise UpdateRefused(f"broadcast over {group_name} failed: {error}") from error
        problems = [self._weights.problem(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)]
        if any(problems):
            raise UpdateRefused("; ".join(problem for problem in problems if problem)[:500])
        self.torn = True
        for name, tensor in zip(names, tensors, strict=True):
            self._weights.load(name, tensor)
            self._missing.discard(name)

    def patch(self, message: bytes, held: str) -> None:
        """Apply a message of changed tensors (`megarl.sync.delta`).

        Args:
            message: as it came.
            held: name of the weights that the engine has.
        Raises:
            UpdateRefused: no update is open, a damaged message, changes against other weights than `held` or against
                weights that are not one whole version, or a tensor that does not fit.
        """
        if not self.open:
            raise UpdateRefused("Weight updates must run between begin_weight_update() and end_weight_update().")
        try:
            base, changes = delta.read_message(message)
            if base is not None and (base != held or not self._may_patch):
                raise UpdateRefused(f"what changed since {base} does not fit {held}"
                                    + ("" if self._may_patch else ", of which parts were overwritten"))
            for change in changes:
                if problem := self._weights.problem(change.name, change.shape):
                    raise UpdateRefused(problem)
                if change.kind == "sparse" and change.name not in self._missing:
                    raise UpdateRefused(f"what changed of {change.name} came twice")
                self.torn = True
                if not self._weights.is_tied_head(change.name):
                    delta.apply(change, self._weights.views[change.name])
                self._missing.discard(change.name)
        except ValueError as error:
            raise UpdateRefused(str(error)) from error

    def _receive_each(self, types: list[torch.dtype], shapes: list[list[int]], group: str) -> list[torch.Tensor]:
        """One broadcast per tensor."""
        tensors = [torch.empty(shape, dtype=kind) for kind, shape in zip(types, shapes, strict=True)]
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._groups[group])
        return tensors

    def _receive_flat(self, types: list[torch.dtype], shapes: list[list[int]], group: str) -> list[torch.Tensor]:
        """One broadcast of all tensors' bytes, one after the other without gaps."""
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(types, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._groups[group])
        return [piece.clone().view(kind).view(shape)  # a clone begins where any dtype may
                for piece, kind, shape in zip(flat.split(sizes), types, shapes, strict=True)]

    def from_disk(self, path: str) -> None:
        """Load a whole checkpoint of the same model.

        Raises:
            UpdateRefused: an update is open, or the checkpoint cannot be loaded; in the second case the engine does
                not serve until a whole update.
        """
        if self.open:
            raise UpdateRefused("A weight update is open.")
        try:
            if HFConfig.read(path).family != self._weights.hf.family:
                raise UpdateRefused(f"{path} is of another model family than {self._weights.hf.family}")
            self.torn = True
            self._weights.load_checkpoint(path)
        except UserMistake as mistake:
            raise UpdateRefused(str(mistake)) from mistake
        self.torn = False


def _dtype(name: str) -> torch.dtype:
    """`bfloat16` or `torch.bfloat16` -> torch.bfloat16."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise UpdateRefused(f"unknown dtype {name!r}")
    return found
