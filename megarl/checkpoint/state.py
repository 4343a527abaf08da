"""Saving and resuming a run, with Megatron-core's distributed checkpointing.

A checkpoint holds weights, fp32 masters, Adam moments and step counts, the number of updates, each rank's random
state, and how far the run is (`Progress`). It is written beside and renamed, so a directory `step_*` is whole.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megarl.cluster import device
from megarl.errors import MachineFault, UserMistake
from megarl.update.optimizer import Optimizer

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: experiences trained on.
        position: where the data goes on.
        unfinished: positions before `position` that were drawn and not trained on yet; they are drawn again first.
        costs: of the pipeline's operations, as measured; {} where they are not.
        collapse: what the alarm for the experts' loads has counted and done.
    """

    step: int = 0
    position: int = 0
    unfinished: tuple[int, ...] = ()
    costs: dict[str, float] = field(default_factory=dict)
    collapse: dict[str, float] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run directory; every method is collective over the trainers.

    Args:
        directory: run_dir/checkpoints.
        keep: how many of the newest are kept.
        optimizer: with its DDP-wrapped chunks.
        identity: what must be equal for a resume to mean the same run; stored, and compared on load.
        settings: plain values, nested; stored, and where they differ on load `changed` tells.

    Attributes:
        changed: dotted key -> (value in the loaded checkpoint, value now).
    """

    def __init__(self, directory: Path, keep: int, optimizer: Optimizer, identity: dict[str, Any],
                 settings: dict[str, Any] | None = None) -> None:
        self._directory, self._keep, self._optimizer = directory, keep, optimizer
        self._identity = json.loads(json.dumps(identity, default=str))
        self._settings = json.loads(json.dumps(settings or {}))
        self.changed: dict[str, tuple[Any, Any]] = {}

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None if there is none."""
        found = self._whole()
        return found[-1] if found else None

    def _whole(self) -> list[Path]:
        """The run's own checkpoints, oldest first; a copy that somebody made under another name is not one."""
        return sorted(path for path in self._directory.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint for `progress`; returns its directory. Older ones beyond `keep` are removed.

        Raises:
            MachineFault: a rank could not write (a full disk, say); earlier checkpoints are untouched.
        """
        from megatron.core import dist_checkpointing

        final = self._directory / f"step_{progress.step:08d}"
        partial = self._directory / f".partial_{progress.step:08d}"
        replaced = self._directory / f".replaced_{progress.step:08d}"
        if dist.get_rank() == 0:
            for left in (*self._directory.glob(".partial_*"), *self._directory.glob(".replaced_*")):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        state = self._state(progress, loading=False, with_random=True)
        try:
            dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
        except CheckpointException as error:  # no Exception: it would pass by whoever turns failures into a status
            raise MachineFault(f"the checkpoint {final} could not be written: {_cause(error)}") from None
        dist.barrier()
        if dist.get_rank() == 0:
            if final.exists():  # of a life that got as far; it stays until the new one can take its name
                final.rename(replaced)
            partial.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
            for old in self._whole()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, path: Path) -> Progress:
        """Restore everything from `path`; returns how far that run was.

        Raises:
            UserMistake: the checkpoint's identity is another (the first difference is named), or it is damaged.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException

        damaged = UserMistake("the checkpoint is damaged", str(path), "remove it; the one before is taken then")
        try:
            common = dist_checkpointing.load_common_state_dict(str(path))
        except (CheckpointingException, OSError, RuntimeError, EOFError, ValueError) as error:
            raise damaged from error
        self._refuse_another_run(path, common["identity"])
        before, now = _flat(common["settings"]), _flat(self._settings)
        self.changed = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())
                        if before.get(key) != now.get(key)}
        same_world = common["world"] == dist.get_world_size()  # another world draws its own random numbers
        try:
            state = dist_checkpointing.load(self._state(Progress(), loading=True, with_random=same_world), str(path))
        except (CheckpointException, CheckpointingException) as error:
            raise damaged from error
        for number, chunk in enumerate(self._optimizer.chunks):
            chunk.module.load_state_dict(state[f"model{number}"])
        self._optimizer.inner.load_state_dict(state["optimizer"])
        self._optimizer.resume_at(common["updates"])
        if same_world:
            _set_random_state(state["random"])
        saved = common["progress"]
        return Progress(**{**saved, "unfinished": tuple(saved["unfinished"])})

    def _state(self, progress: Progress, loading: bool, with_random: bool) -> dict[str, Any]:
        """The state dict that is saved, or the pattern into which a checkpoint is loaded."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        rank, world = dist.get_rank(), dist.get_world_size()
        state: dict[str, Any] = {f"model{number}": chunk.module.sharded_state_dict(metadata=dict(_METADATA))
                                 for number, chunk in enumerate(self._optimizer.chunks)}
        state["optimizer"] = self._optimizer.inner.sharded_state_dict(dict(state), is_loading=loading,
                                                                      metadata=dict(_METADATA))
        if with_random:
            state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
        state |= {"progress": dataclasses.asdict(progress), "identity": self._identity, "world": world,
                  "settings": self._settings,
                  "updates": self._optimizer.updates}
        return state

    def _refuse_another_run(self, path: Path, saved: dict[str, Any]) -> None:
        for key in sorted(saved.keys() | self._identity.keys()):
            if saved.get(key) != self._identity.get(key):
                auto = key == "layout" and self._settings.get("pipeline", {}).get("schedule") == "auto"
                raise UserMistake(f"it was made with {key} = {saved.get(key)}, this run has {self._identity.get(key)}",
                                  str(path), "change the config back, or use another run.dir" + (
                                      "; pipeline.schedule: auto takes batch sizes and lengths into account to place "
                                      "stages, name a schedule to decide it" if auto else ""))


def _cause(error: CheckpointException) -> str:
    """What the first rank that failed says."""
    rank, (wrapped, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(wrapped).__name__}: {wrapped}"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _random_state() -> dict[str, Any]:
    """Every random generator of this process, Megatron-core's tracker included."""
    from megatron.core import tensor_parallel

    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "device": device.rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    device.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
