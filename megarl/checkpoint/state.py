"""Saving and resuming a run, with Megatron-core's distributed checkpointing.

A checkpoint holds everything that the run's future depends on: weights (with expert biases), fp32 masters and moments,
the number of updates, each rank's random state, how far the run is (`Progress`), and the sampled groups that wait to be
trained on. Saving stalls the run for a copy to host memory; a thread writes. It loads into any parallel layout.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megarl.checkpoint import background, files
from megarl.checkpoint.find import by_first, damage, together
from megarl.checkpoint.optimizer_state import KINDS, PREFIX, Piece, pieces, set_step
from megarl.cluster import device
from megarl.errors import MachineFault, UserMistake
from megarl.update.optimizer import Optimizer

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_FORMAT = 2
_LOAD_BYTES = 1 << 30  # of optimizer states read by a rank before they are handed out


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: experiences trained on.
        position: where the data goes on.
        unfinished: positions before `position` that were drawn and are not trained on and not held; drawn again first.
        held: of each group that was sampled and waits to be trained on, in the order in which they finished, the
            number of the newest weights when it was issued.
        costs: of the pipeline's operations, as measured; {} where they are not.
        collapse: what the alarm for the experts' loads has counted and done.
        guard: what the alarm for leaps compares with.
    """

    step: int = 0
    position: int = 0
    unfinished: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    costs: dict[str, float] = field(default_factory=dict)
    collapse: dict[str, float] = field(default_factory=dict)
    guard: dict[str, list[float]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run directory; every method is collective over the trainers.

    Args:
        directory: run_dir/checkpoints.
        keep, keep_every: the newest so many are kept, and those whose step `keep_every` divides (0: no others).
        optimizer: with its DDP-wrapped chunks.
        identity: what must be equal for a resume to mean the same run; stored, and compared on load.
        settings: plain values, nested; stored, and where they differ on load `changed` tells.
        fixed: says of a dotted key of `settings` whether a change of it is refused.

    Attributes:
        changed: dotted key -> (value in the loaded checkpoint, value now).
    """

    def __init__(self, directory: Path, keep: int, optimizer: Optimizer, identity: dict[str, Any],
                 settings: dict[str, Any] | None = None, *, keep_every: int = 0,
                 fixed: Callable[[str], bool] = lambda key: False) -> None:
        self._directory, self._keep, self._keep_every, self._optimizer = directory, keep, keep_every, optimizer
        self._identity = json.loads(json.dumps(identity, default=str))
        self._settings, self._fixed = json.loads(json.dumps(settings or {})), fixed
        self.changed: dict[str, tuple[Any, Any]] = {}
        self._step = -1
        self._writing: tuple[Path, Path, background.Writing] | None = None
        background.use_thread_results()

    def save(self, progress: Progress, write_more: Callable[[Path], list[Path]] = lambda folder: []) -> None:
        """Start a checkpoint for `progress`: returns once what it holds is copied. One that is under way ends first.

        Nothing is done for the step that was loaded or saved last.

        Args:
            progress: how far the run is.
            write_more: writes further files of this rank into the directory (in a thread); their paths.
        Raises:
            MachineFault: as `finish` does.
        """
        from megatron.core import dist_checkpointing

        if progress.step == self._step:
            return
        self.finish()
        final = self._directory / f"step_{progress.step:08d}"
        partial = self._directory / f".partial_{progress.step:08d}"
        by_first(final, lambda: files.begin(self._directory, progress.step))
        state, own = self._state(progress)
        with _as_fault(final), background.failures_kept() as failures:
            request = dist_checkpointing.save(state, str(partial), async_sharded_save=True, content_metadata=_METADATA)
        together(lambda: _raise(failures), final)
        self._step = progress.step
        self._writing = (partial, final, background.Writing(request, own, lambda: write_more(partial)))

    def poll(self) -> Path | None:
        """Finish the save that is under way if all trainers have written; its path then. Called once a step."""
        if self._writing is None:
            return None
        left = torch.tensor([not self._writing[2].done()], dtype=torch.int32, device=device.current())
        dist.all_reduce(left)
        return None if left else self.finish()

    def finish(self) -> Path | None:
        """Wait for the save that is under way, and give it its name; its path. Older ones beyond those kept go.

        Raises:
            MachineFault: a rank could not write (a full disk, say); earlier checkpoints are untouched.
        """
        if self._writing is None:
            return None
        (partial, final, writing), self._writing = self._writing, None
        step, self._step = self._step, -1  # until it has succeeded
        sums = together(writing.wait, final)
        with _as_fault(final), background.failures_kept() as failures:
            writing.conclude()
        together(lambda: _raise(failures), final)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, sums)

        def conclude() -> None:
            told = {name: value for part in gathered for name, value in part.items()}
            told |= {path.name: files.digest(path) for path in partial.iterdir() if path.name not in told}
            files.commit(partial, final, told)
            files.prune(self._directory, self._keep, self._keep_every)

        by_first(final, conclude)
        self._step = step
        return final

    def load(self, path: Path, verify: bool = True) -> Progress:
        """Restore everything from `path`, whatever the weights were before; returns how far that run was.

        Args:
            path: a checkpoint.
            verify: compare its files with their checksums first, as `find` has done for the one that it found.

        Raises:
            UserMistake: the checkpoint's identity or a fixed setting is another (told), or it is damaged.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException

        if verify and (wrong := damage(path)):
            raise UserMistake(f"the checkpoint is damaged: {wrong}", str(path), "remove it; the one before is taken "
                              "then")
        try:
            common = dist_checkpointing.load_common_state_dict(str(path))
            self._refuse_another_run(path, common)
            same_world = common["world"] == dist.get_world_size()  # another world draws its own random numbers
            state = dist_checkpointing.load(self._pattern(same_world), str(path))
            for number, chunk in enumerate(self._optimizer.chunks):
                chunk.module.load_state_dict(state[f"model{number}"])
            self._load_optimizer(path, common["updates"])
        except (CheckpointException, CheckpointingException, KeyError) as error:
            raise UserMistake(f"it is not a checkpoint of this model and version: {error}", str(path),
                              "remove it, or use another run.dir") from error
        if same_world:
            _set_random_state(state["random"])
        saved = common["progress"]
        self._step = saved["step"]
        return Progress(**{**saved, "unfinished": tuple(saved["unfinished"]), "held": tuple(saved["held"])})

    def _weights(self) -> dict[str, Any]:
        return {f"model{number}": chunk.module.sharded_state_dict(metadata=dict(_METADATA))
                for number, chunk in enumerate(self._optimizer.chunks)}

    def _state(self, progress: Progress) -> tuple[dict[str, Any], set[int]]:
        """The state dict that is saved, and the addresses of those of its tensors that are copies already."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        rank, world = dist.get_rank(), dist.get_world_size()
        state = self._weights()
        named, own = _by_parameter(state), set()
        optimizer: dict[str, Any] = {}
        for number, piece in enumerate(pieces(self._optimizer.inner)):
            flat = piece.whole()
            if flat is not None:
                own |= {row.data_ptr() for row in flat}
                optimizer |= {f"{kind}.{number}": _sharded(piece, named, kind, row)
                              for kind, row in zip(KINDS, flat, strict=True)}
        state["optimizer"] = optimizer
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
        state |= {"progress": dataclasses.asdict(progress), "identity": self._identity, "world": world,
                  "settings": self._settings, "updates": self._optimizer.updates, "format": _FORMAT}
        return state, own

    def _pattern(self, with_random: bool) -> dict[str, Any]:
        """What of a checkpoint is loaded first: all but the optimizer's states."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        state = self._weights()
        if with_random:
            state["random"] = ShardedObject("random", None, (dist.get_world_size(),), (dist.get_rank(),))
        return state

    def _load_optimizer(self, path: Path, updates: int) -> None:
        """Read the states some parameters at a time: each on the rank that owns it, which hands it out."""
        from megatron.core import dist_checkpointing

        named = _by_parameter(self._weights())
        for some in _runs(pieces(self._optimizer.inner)):
            flat = {number: torch.empty(len(KINDS), piece.parameter.numel())
                    for number, piece in enumerate(some) if piece.owned}
            wanted = {f"{kind}.{number}": _sharded(some[number], named, kind, row)
                      for number, rows in flat.items() for kind, row in zip(KINDS, rows, strict=True)}
            found = dist_checkpointing.load({"optimizer": wanted}, str(path), validate_access_integrity=False)
            for number, piece in enumerate(some):
                if piece.owned:
                    for row, kind in enumerate(KINDS):
                        flat[number][row] = found["optimizer"][f"{kind}.{number}"].reshape(-1)
                piece.put(flat.get(number), updates)
        set_step(self._optimizer.inner, updates)
        self._optimizer.resume_at(updates)

    def _refuse_another_run(self, path: Path, common: dict[str, Any]) -> None:
        if common.get("format") != _FORMAT:
            raise UserMistake("it was written by another version of megarl, or by another program", str(path),
                              "export that run's weights and start from them, or use another run.dir")
        saved = common["identity"]
        for key in sorted(saved.keys() | self._identity.keys()):
            if saved.get(key) != self._identity.get(key):
                raise UserMistake(f"it was made with {key} = {saved.get(key)}, this run has {self._identity.get(key)}",
                                  str(path), "change the config back, or use another run.dir")
        before, now = _flat(common["settings"]), _flat(self._settings)
        self.changed = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())
                        if before.get(key) != now.get(key)}
        # a key that the checkpoint does not know is of a newer version
        refused = [f"{key} was {before[key]}, is {now.get(key)}" for key in self.changed
                   if key in before and self._fixed(key)]
        if refused:
            raise UserMistake(f"the run would go on by other rules: {'; '.join(refused)}", str(path),
                              "change the config back, set checkpoint.allow_changes: true, or give another run.dir")


def _raise(failures: list[Exception]) -> None:
    """The first of them, if there is one."""
    if failures:
        raise failures[0]


class _as_fault:
    """Turns what a failing disk makes of Megatron-core's calls into a MachineFault of this rank.

    Where only this rank has failed the others wait for it in a collective, and end with its process.
    """

    def __init__(self, final: Path) -> None:
        self._final = final

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckpointException):  # no Exception: it would pass by `errors.run_main`
            causes = [f"rank {rank}: {type(wrapped).__name__}: {wrapped}"
                      for rank, (wrapped, _) in error.failures.items()]  # only rank 0 knows them
            raise MachineFault(f"the checkpoint {self._final} could not be written"
                               + (f": {causes[0]}" if causes else "")) from None
        if isinstance(error, OSError | RuntimeError):  # torch.save makes a RuntimeError of a full disk
            raise MachineFault(f"the checkpoint {self._final} could not be written: {error}") from error


def _by_parameter(state: dict[str, Any]) -> dict[int, Any]:
    """What Megatron-core says of where each parameter lies in the whole model, by the parameter's id."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {id(one.data): one for one in nested_values(sharded)}


def _sharded(piece: Piece, named: dict[int, Any], kind: str, row: torch.Tensor) -> Any:
    """A row of a parameter's state as a part of the whole model's, stored once for all data-parallel ranks."""
    model = named[id(piece.parameter)]
    changed = {"key": f"{PREFIX}.{kind}.{model.key}", "data": row.view(piece.parameter.shape),
               "replica_id": (*model.replica_id[:-1], 0)}
    return replace(model, **changed, **({"dtype": row.dtype} if hasattr(model, "dtype") else {}))


def _runs(found: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces in runs of about _LOAD_BYTES, as many runs on every trainer: reading is collective."""
    runs, size = [[]], 0
    for piece in found:
        runs[-1].append(piece)
        size += 4 * len(KINDS) * piece.parameter.numel()
        if size >= _LOAD_BYTES:
            runs.append([])
            size = 0
    most = torch.tensor(len(runs), device=device.current())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    yield from runs + [[] for _ in range(int(most) - len(runs))]


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
