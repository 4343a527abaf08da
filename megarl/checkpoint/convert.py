"""Hugging Face checkpoint <-> Megatron-core checkpoint, tensor by tensor, on any number of processes.

Nothing is built and nothing is whole in memory: a tensor is read, cut or fused by the family's name table, written,
and forgotten. The new directory appears under its name when all of it is on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megarl.checkpoint import files, shares, streams
from megarl.checkpoint.megatron_dir import (
    BESIDE,
    MegatronDir,
    Place,
    common_state,
    damaged,
    place,
    walk,
    whole_shape,
)
from megarl.checkpoint.safetensors_dir import SafetensorsDir, carry_over, has_weights
from megarl.checkpoint.streams import Box, Slot
from megarl.checkpoint.team import Team, shared_out
from megarl.cluster.lock import lock
from megarl.errors import MachineFault, UserMistake
from megarl.model.families import tables
from megarl.model.families.tables import Entry
from megarl.model.hf_config import HFConfig

VOCAB_MULTIPLE = 8  # as the embedding of a model on one rank has it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Converted:
    """What a conversion has written.

    Attributes:
        tensors: Hugging Face tensors of the model.
        beside: tensors that came along and are not trained.
        bytes: of both.
    """

    tensors: int
    beside: int
    bytes: int

    def describe(self) -> str:
        """One line."""
        beside = f" and {self.beside} that are not trained" if self.beside else ""
        return f"{self.tensors} tensors{beside}, {self.bytes / 1e9:.3f} GB"


@dataclass(frozen=True)
class _Piece:
    """One box of a Megatron-core checkpoint and how to get its contents."""

    box: Box
    read: Callable[[], torch.Tensor]


def to_megatron(source: Path, target: Path, team: Team, dtype: torch.dtype | None = None) -> Converted:
    """Make a Megatron-core checkpoint of a Hugging Face one; collective over `team`.

    Config, tokenizer and the other files come along, and so do tensors that the family leaves out of training (layers
    for multi-token prediction).

    Args:
        source: directory with config.json and *.safetensors.
        target: to be made, on a file system that all processes share.
        team: who does it.
        dtype: of the weights, routers' biases aside; None: each as it is.

    Raises:
        UserMistake: something is wrong with `source`, or `target` is there already or cannot be made.
        MachineFault: a file could not be written (a full disk, say).
    """
    def check() -> tuple[HFConfig, SafetensorsDir, list[_Piece]]:
        hf = HFConfig.read(source)
        checkpoint = SafetensorsDir(source)
        checkpoint.check(hf)
        return hf, checkpoint, list(_pieces(hf, checkpoint, dtype))

    hf, checkpoint, pieces = team.each(check)
    mine = shared_out([piece.box.bytes for piece in pieces], team)
    with _appearing(target, team) as partial:
        def write() -> streams.Written:
            with streams.BoxFile(partial / f"__{team.rank}_0.distcp") as out:
                for number in mine:
                    out.add(pieces[number].box, pieces[number].read())
                    checkpoint.close()  # and what was mapped of the file
            return out.written

        def end() -> None:
            raw = _carry(source, partial, dtype)
            streams.finish(partial, written, {"identity": {"model": raw}, "converted_from": str(source)})

        written = team.gather(team.each(lambda: _told(write)))
        team.first(lambda: _told(end))
        _sign(partial, team)
    return Converted(sum(1 for _ in tables.hf_tensors(hf)), len(checkpoint.beside(hf)),
                     sum(piece.box.bytes for piece in pieces))


def _sign(folder: Path, team: Team) -> None:
    """Note the checksums of a checkpoint's files, as a run does it."""
    names = team.gather(sorted(path.name for path in folder.iterdir()))[0]  # others may see the directory late
    mine = names[team.rank::team.size]
    found = team.gather(team.each(lambda: _told(lambda: {name: files.digest(folder / name) for name in mine})))
    team.first(lambda: _told(lambda: files.write_checksums(folder, {
        name: value for part in found for name, value in part.items()})))


def refuse_damaged(path: Path, team: Team) -> int | None:
    """Compare a checkpoint's files with the checksums that were noted when it was written; collective over `team`.

    Returns:
        How many files there are; None if nothing was noted.

    Raises:
        UserMistake: names the first that differs.
    """
    if not (path / files.CHECKSUMS).is_file():
        return None

    def check() -> int:
        try:
            told = files.expected(path)
        except (OSError, ValueError) as error:
            raise damaged(path, f"{files.CHECKSUMS}: {error}") from None
        if why := files.damage(path, sorted(told)[team.rank::team.size], told):
            raise damaged(path, why)
        return len(told)

    return team.each(check)


def _pieces(hf: HFConfig, checkpoint: SafetensorsDir, dtype: torch.dtype | None) -> Iterator[_Piece]:
    """All boxes of the model, in its order, and those beside it."""
    stacked = not hf.dense_layers
    first: dict[str, tuple[str, torch.dtype]] = {}
    for entry, layer, expert in walk(tables.table(hf), hf):
        where, names = place(entry, layer, expert, stacked), [tensor.at(layer, expert) for tensor in entry.hf]
        for name in names:
            wanted = _dtype(checkpoint, name, dtype)
            other, other_dtype = first.setdefault(where.key, (name, wanted))
            if wanted != other_dtype:
                raise UserMistake(f"{name} is {wanted}, {other} is {other_dtype}, and they become one tensor",
                                  str(checkpoint.path), "name a dtype for all: --dtype")
        counts = ((hf.layers,) if "{layer}" in entry.megatron and stacked else ()) + (
            (hf.experts,) if entry.expert else ())
        yield from _parameter(entry, names, checkpoint, hf, counts, where, first[where.key][1])
    for name in checkpoint.beside(hf):
        shape = checkpoint.shape(name)
        box = Box(f"{BESIDE}{name}", shape, _dtype(checkpoint, name, dtype), (0,) * len(shape), shape)
        yield _Piece(box, lambda name=name, shape=shape: checkpoint.read(name, shape))


def _dtype(checkpoint: MegatronDir | SafetensorsDir, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """That a tensor is to have if `dtype` was asked for, or none was."""
    return checkpoint.dtype(name) if dtype is None or tables.is_buffer(name) else dtype


def _parameter(entry: Entry, names: list[str], checkpoint: SafetensorsDir, hf: HFConfig, counts: tuple[int, ...],
               where: Place, dtype: torch.dtype) -> Iterator[_Piece]:
    """The boxes of one parameter: one for each tensor that it is made of, or, of fused heads, one for all."""
    shape = list(whole_shape(entry))
    if entry.kind == "vocab":
        shape[0] = -(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def box(first: int, rows: int) -> Box:
        return Box(where.key, (*counts, *shape), dtype, (*where.at, first, *[0] * (len(shape) - 1)),
                   (*[1] * len(where.at), rows, *shape[1:]))

    def read(number: int) -> torch.Tensor:
        return checkpoint.read(names[number], entry.hf[number].shape)

    if entry.kind == "qkv":
        yield _Piece(box(0, shape[0]), lambda: shares.fuse(entry, [read(n) for n in range(len(names))], hf))
        return
    first = 0
    for number, tensor in enumerate(entry.hf):
        yield _Piece(box(first, tensor.shape[0]), lambda number=number: read(number))
        first += tensor.shape[0]
    if first < shape[0]:
        padding = (shape[0] - first, *shape[1:])
        yield _Piece(box(first, padding[0]), lambda: torch.zeros(padding, dtype=dtype))


def to_hf(source: Path, target: Path, team: Team, like: Path | None = None, dtype: torch.dtype | None = None,
          shard_bytes: int = 5_000_000_000) -> Converted:
    """Make a Hugging Face checkpoint of a Megatron-core one; collective over `team`.

    Args:
        source: a converted checkpoint, or one of a run (`checkpoints/step_*`), of any layout.
        target: to be made, on a file system that all processes share.
        team: who does it.
        like: the Hugging Face checkpoint that config, tokenizer and dtypes are taken from, and tensors that are not
            trained; None: what came along with a converted checkpoint, or the run's model.path.
        dtype: of the weights, routers' biases aside; None: as in `like`.
        shard_bytes: at most so many in a file, unless one tensor is larger.

    Raises:
        UserMistake: something is wrong with `source` or `like`, or `target` is there already or cannot be made.
        MachineFault: a file could not be written (a full disk, say).
    """
    def check() -> tuple[Path, HFConfig, _Origins, streams.Files]:
        common = common_state(source)
        origin = like or _origin(source, common)
        checkpoint = MegatronDir(source, HFConfig.read(origin))
        slots, origins = _plan(checkpoint, origin, dtype)
        return origin, checkpoint.hf, origins, streams.plan_files([slots], shard_bytes)[0]

    origin, hf, origins, planned = team.each(check)
    refuse_damaged(source, team)
    mine = [planned[n] for n in shared_out([sum(slot.bytes for slot in slots) for _, slots in planned], team)]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for slot in (slot for _, slots in mine for slot in slots):
            yield slot.name, origins[slot.name].read(slot.name, slot.shape)
            origins[slot.name].close()

    def end(partial: Path) -> None:
        _carry(origin, partial, dtype)
        streams.write_index(partial, planned)

    with _appearing(target, team) as partial:
        team.each(lambda: _told(lambda: streams.write_files(partial, mine, tensors())))
        team.first(lambda: _told(lambda: end(partial)))
    slots, model = [slot for _, slots in planned for slot in slots], sum(1 for _ in tables.hf_tensors(hf))
    return Converted(model, len(slots) - model, sum(slot.bytes for slot in slots))


_Origins = dict[str, MegatronDir | SafetensorsDir]


def _origin(source: Path, common: dict[str, Any]) -> Path:
    """The directory with the model's config and tokenizer."""
    if (source / "config.json").is_file():
        return source
    path = Path(str(common.get("settings", {}).get("model", {}).get("path", "")))
    if not (path / "config.json").is_file():
        raise UserMistake(f"the model's directory {path} is not there any more", str(source),
                          "name a directory with its config.json and tokenizer: --like")
    return path


def _plan(checkpoint: MegatronDir, origin: Path, dtype: torch.dtype | None) -> tuple[list[Slot], _Origins]:
    """All tensors to be written, and where each is read."""
    hf, slots, origins = checkpoint.hf, [], {}
    model = SafetensorsDir(origin) if has_weights(origin) else None
    told = model or (checkpoint if origin == checkpoint.path else None)  # who knows the dtypes

    def wanted(name: str) -> torch.dtype:
        if told is None:  # a run's checkpoint, and a config without weights
            return _dtype(checkpoint, name, dtype or DTYPES.get(hf.dtype, torch.float32))
        return _dtype(told, name, dtype)

    for tensor in tables.hf_tensors(hf):
        slots.append(Slot(tensor.name, tensor.shape, wanted(tensor.name)))
        origins[tensor.name] = checkpoint
    for other, names in ((checkpoint, checkpoint.beside), (model, model.beside(hf) if model else [])):
        for name in names:
            if name not in origins:
                slots.append(Slot(name, other.shape(name), _dtype(other, name, dtype)))
                origins[name] = other
    return slots, origins


def _carry(source: Path, target: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Copy config, tokenizer and the rest; a new dtype is noted in the config. Returns the config."""
    carry_over(source, target)
    raw = json.loads((target / "config.json").read_text())
    if dtype is not None:
        raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return raw


@contextmanager
def _appearing(target: Path, team: Team) -> Iterator[Path]:
    """A directory to write in, which gets the name `target` at the end; of a failure nothing stays."""
    target = target.resolve()  # a link to a directory stays one
    partial = target.parent / f".{target.name}.partial"
    held: list[IO[str]] = []

    def begin() -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserMistake("it is there already, and is left as it is", str(target), "name another directory")
        if target.is_mount():
            raise UserMistake("a file system is mounted there, and it must be made anew", str(target),
                              "name a directory in it")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = partial.with_suffix(".lock").open("w")
            lock(file)  # two conversions would write into each other's files
            held.append(file)
            shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
            partial.mkdir()
        except BlockingIOError:
            raise UserMistake("another conversion is making it", str(target),
                              "wait for it, or name another directory") from None
        except OSError as error:
            raise UserMistake(f"it cannot be made: {error.strerror}", str(target),
                              "name a directory that can be written") from None

    def end() -> None:
        for path in (*partial.iterdir(), partial):
            files.flush(path)
        if target.exists():
            target.rmdir()
        partial.rename(target)
        files.flush(target.parent)

    try:
        team.first(begin)
        yield partial
        team.first(lambda: _told(end))
    finally:
        if held:
            shutil.rmtree(partial, ignore_errors=True)
            Path(held[0].name).unlink(missing_ok=True)
            held[0].close()


def _told(work: Callable[[], Any]) -> Any:
    """Do it; a failing disk is a fault of the machine."""
    try:
        return work()
    except OSError as error:
        raise MachineFault(f"{error.filename or 'a file'} could not be written: {error.strerror}") from error
