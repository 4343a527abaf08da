"""The disk transport: each version is a checkpoint directory that every engine loads by itself.

For engines whose ranks a broadcast does not reach (SGLang with pipeline stages) and for hosts without a network between
trainers and engines, as long as all of them see one file system. Writing goes on while the engines generate; they are
paused only for loading.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl.checkpoint.safetensors_dir import INDEX, carry_over
from megarl.errors import UserMistake
from megarl.rollout.fleet import EngineRecord
from megarl.sync.crew import Crew, Targets
from megarl.sync.sets import EngineSet
from megarl.sync.transport import Sent, Tensors, run_out

SHARD_BYTES = 2 << 30  # engines read several files at once


class Disk:
    """Writes versions, and has engines load them.

    A version is written under a name that begins with a dot and renamed when it is whole; older ones are removed once
    the engines hold the new one.

    Args:
        crew: the trainers.
        stage: this rank's pipeline stage.
        is_source: whether this rank writes.
        directory: of this run alone; whatever else is in it is removed.
        model: directory of the checkpoint that training began with: its config and tokenizer go along.
        load_format: of SGLang, None: as it is configured.
        timeout_s: of loading.
    """

    session = False

    def __init__(self, crew: Crew, *, stage: int, is_source: bool, directory: Path, model: Path,
                 load_format: str | None, timeout_s: float) -> None:
        self._crew, self._stage, self._is_source = crew, stage, is_source
        self._directory, self._model = directory, model
        self._load_format, self._timeout_s = load_format, timeout_s
        self._version, self._sent = "", Sent()

    def prepare(self, version: str, tensors: Tensors) -> None:
        """Write the version; only the tensors of one file are kept in memory."""
        if version == self._version:
            return
        partial, speaks = self._directory / f".{_folder(version)}", self._stage == 0 and self._is_source
        self._crew.together(lambda: self._make_room(partial) if speaks else None)
        written = self._crew.gathered(self._crew.together(lambda: self._write(partial, tensors)))

        def publish() -> None:
            files = {name: file for part in written for name, (file, _) in part.items()}
            total = sum(size for part in written for _, size in part.values())
            carry_over(self._model, partial)
            (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
            os.replace(partial, self._directory / _folder(version))

        self._crew.together(lambda: publish() if speaks else None)
        mine = [size for _, size in written[dist.get_rank()].values()]
        self._version, self._sent = version, Sent(len(mine), sum(mine))

    def _make_room(self, partial: Path) -> None:
        """Begin a version; what earlier lives left is removed, except the version that engines may be loading."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_all_but(_folder(self._version))
            partial.mkdir()
        except OSError as error:
            raise UserMistake(f"weights cannot be written to {self._directory}: {error.strerror}", "sync.directory",
                              "name a directory that trainers can write to and engines can read") from error

    def _remove_all_but(self, kept: str) -> None:
        for other in self._directory.iterdir():
            if other.name != kept:
                shutil.rmtree(other)

    def _write(self, folder: Path, tensors: Tensors) -> dict[str, tuple[str, int]]:
        """This source's files; name -> (file, bytes) of each tensor."""
        if not self._is_source:
            run_out(tensors())
            return {}
        shard: dict[str, torch.Tensor] = {}
        found: dict[str, tuple[str, int]] = {}
        number = filled = 0

        def flush() -> None:
            nonlocal shard, number, filled
            if shard:
                save_file(shard, folder / _file(self._stage, number), metadata={"format": "pt"})
            shard, number, filled = {}, number + 1, 0

        gathered = tensors()
        try:
            for name, tensor in gathered:
                if filled and filled + tensor.nbytes > SHARD_BYTES:
                    flush()
                shard[name] = tensor.to("cpu", copy=True).contiguous()
                found[name] = _file(self._stage, number), tensor.nbytes
                filled += tensor.nbytes
            flush()
        finally:
            run_out(gathered)
        return found

    def connect(self, targets: Targets) -> None:
        """The file system connects: nothing."""

    def send(self, targets: Targets, tensors: Tensors) -> Sent:
        """Have the engines load what was written."""
        path = self._directory / _folder(self._version)
        self._crew.tell(targets, lambda client: client.update_from_disk(
            str(path), load_format=self._load_format, timeout_s=self._timeout_s), f"load {path}")
        if self._stage == 0 and self._is_source:
            self._remove_all_but(path.name)
        return self._sent

    def leave(self, sets: Sequence[EngineSet], engines: Collection[EngineRecord]) -> None:
        """Nothing was made."""

    def close(self) -> None:
        """Nothing was made; the last version stays."""


def _folder(version: str) -> str:
    return f"weights-{version.replace(':', '-').replace('/', '-')}"


def _file(stage: int, number: int) -> str:
    return f"model-{stage:03d}-{number:05d}.safetensors"
