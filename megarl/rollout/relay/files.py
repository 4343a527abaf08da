"""A checkpoint directory that changes in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.checkpoint.safetensors_dir import INDEX, carry_over
from megarl.model.families.tables import hf_tensors
from megarl.model.hf_config import HFConfig
from megarl.sync import delta
from megarl.sync.checksum import tensor_checksum


class CopyRefused(Exception):
    """What was asked cannot be done; the message goes into the answer with `success: false`."""


class Copy:
    """The weights of one version as safetensors files, mapped into memory. Not thread-safe.

    Args:
        directory: made anew; whatever is there goes.
        model: checkpoint directory whose config and tokenizer go along.

    Attributes:
        version: name of the weights, "" before the first.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        carry_over(model, directory)
        self.directory, self.version = directory, ""
        self._expected = {tensor.name for tensor in hf_tensors(HFConfig.read(model))}
        self._views: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._missing: set[str] = set()
        self._files, self._open, self._torn, self._may_patch = 0, False, False, False

    def begin(self) -> None:
        """Open an update."""
        if self._open:
            raise CopyRefused("A weight update is already open.")
        self._open, self._missing, self._may_patch = True, set(self._expected), not self._torn

    def patch(self, message: bytes) -> None:
        """Take a message of changed tensors; new ones become a file of their own.

        Raises:
            CopyRefused: no update is open, a damaged message, changes against another version or a torn one, or a
                tensor that the model does not have.
        """
        if not self._open:
            raise CopyRefused("Weight updates must run between begin_weight_update() and end_weight_update().")
        try:
            base, changes = delta.read_message(message)
            if base is not None and (base != self.version or not self._may_patch):
                raise CopyRefused(f"what changed since {base} does not fit {self.version or 'nothing'}"
                                  + ("" if self._may_patch else ", of which parts were overwritten"))
            names = [change.name for change in changes]
            if wrong := [name for name in names if name not in self._missing]:
                raise CopyRefused(f"{wrong[0]} came twice, or the model has no such tensor")
            self._torn = True
            new = {}
            for change in changes:
                view = self._views.get(change.name)
                if change.kind == "whole" and (view is None or view.dtype != delta.dtype_of(change)):
                    new[change.name] = torch.empty(change.shape, dtype=delta.dtype_of(change))
                    delta.apply(change, new[change.name])
                elif view is None:
                    raise CopyRefused(f"what changed of {change.name} came before the tensor itself")
                else:
                    delta.apply(change, view)
            if new:
                self._add(new)
            self._missing.difference_update(names)
        except ValueError as error:
            raise CopyRefused(str(error)) from error

    def end(self) -> None:
        """Close the update; every tensor must have come. The copy has no version until it is named."""
        if not self._open:
            raise CopyRefused("No weight update is open.")
        self._open = False
        if self._torn:
            self.version = ""
        if self._missing:
            raise CopyRefused(f"{len(self._missing)} of {len(self._expected)} tensors were not sent, among them "
                              f"{min(self._missing)}")
        total = sum(view.nbytes for view in self._views.values())
        (self.directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total},
                                                        "weight_map": self._file_of}))
        self._torn = False

    def checksums(self) -> dict[str, str]:
        """Of each tensor, by name."""
        return {name: tensor_checksum(view) for name, view in self._views.items()}

    def _add(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self.directory / f"part-{self._files:05d}.safetensors"
        self._files += 1
        save_file(tensors, path, metadata={"format": "pt"})
        flat = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        start = 8 + int(flat[:8].view(torch.int64))
        header = json.loads(flat[8:start].numpy().tobytes())
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]
            self._views[name] = flat[start + begin:start + end].view(tensor.dtype).view(tensor.shape)
            self._file_of[name] = path.name
