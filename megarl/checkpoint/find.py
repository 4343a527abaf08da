"""Which checkpoint a run goes on from: found before there is a model, so that it alone need be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint import files
from megarl.errors import MachineFault, UserMistake

ROOM = "\n  remedy: see that there is room and may be written; the same command goes on from the checkpoint before"


@dataclass(frozen=True)
class Found:
    """What a run goes on from.

    Attributes:
        path: the newest checkpoint that is whole and undamaged; None: there has been none.
        passed_over: what is wrong with newer ones. They are out of the way then (`files.set_aside`).
    """

    path: Path | None = None
    passed_over: tuple[str, ...] = ()


def find(directory: Path) -> Found:
    """Look through a run's checkpoints, the newest first. Collective over the trainers, who share the reading.

    Raises:
        UserMistake: all are damaged. They stay where they are, so that no later start begins anew without a word.
    """
    by_first(directory, lambda: files.recover(directory))
    listed = [files.whole(directory)]
    dist.broadcast_object_list(listed, src=0)  # a file system may show them later to others
    bad: list[tuple[Path, str]] = []
    for path in reversed(listed[0]):
        if not (wrong := damage(path)):
            by_first(directory, lambda: [files.set_aside(one) for one, _ in bad])
            return Found(path, tuple(f"{one} is damaged: {what}" for one, what in bad))
        bad.append((path, wrong))
    if bad:
        raise UserMistake("no checkpoint can be used: " + "; ".join(f"{one} is damaged: {what}" for one, what in bad),
                          str(directory), "remove them to begin anew, or copy good ones there")
    return Found()


def damage(path: Path) -> str:
    """What is wrong with the files of a checkpoint, told by all trainers, who share the reading; "" if nothing."""
    try:
        told = files.expected(path)
    except (OSError, ValueError) as error:
        wrong = f"{files.CHECKSUMS} cannot be read: {error}"
    else:
        wrong = files.damage(path, sorted(told)[dist.get_rank()::dist.get_world_size()], told)
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return next((one for one in everyone if one), "")


def by_first(final: Path, work: Callable[[], Any]) -> None:
    """Have rank 0 do it; all raise if it fails."""
    together(work if dist.get_rank() == 0 else lambda: None, final)


def together(work: Callable[[], Any], final: Path) -> Any:
    """This rank's part of something, in which it waits for nobody; its result once all have done theirs.

    Raises:
        MachineFault: on every trainer, if one of them failed.
    """
    failure, result = "", None
    try:
        result = work()
    except Exception as error:  # told to all: whoever goes on would wait for this rank
        failure = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, failure)
    if any(told):
        raise MachineFault(f"the checkpoint {final} could not be written: {next(one for one in told if one)}{ROOM}")
    return result
