"""What the ways of bringing weights to engines have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megarl.rollout.fleet import EngineRecord
from megarl.sync.crew import Targets
from megarl.sync.sets import EngineSet

# All tensors of this rank's stages by Hugging Face name; the source has them, on other ranks they are None. Collective
# over the stage's ranks unless it is a snapshot; can be called again.
Tensors = Callable[[], Iterator[tuple[str, torch.Tensor | None]]]


class Sent(NamedTuple):
    """What this trainer sent to each engine; bytes: to the one that got most."""

    tensors: int = 0
    bytes: int = 0


class Transport(Protocol):
    """A way for weights to travel. Every method is collective over the trainers.

    Engines that fail are noted in `targets`, by their sets; what fails in a trainer is raised on all.

    Attributes:
        session: whether engines must be between begin and end during `send`.
    """

    session: bool

    def prepare(self, version: str, tensors: Tensors) -> None:
        """What can be done while the engines still generate. Nothing if done before for this version."""

    def connect(self, targets: Targets) -> None:
        """Make what is missing between the sources and these sets."""

    def send(self, targets: Targets, tensors: Tensors) -> Sent:
        """Bring the prepared version to paused engines. Every engine has each tensor when it returns."""

    def leave(self, sets: Sequence[EngineSet], engines: Collection[EngineRecord]) -> None:
        """Unmake what is between the sources and sets that are no more; `engines` still are there and are told."""

    def close(self) -> None:
        """Unmake everything of this side's."""


def run_out(iterator: Iterator[Any]) -> None:
    """Take part in gathering what nobody here wants (any more): the other ranks of a stage must not wait."""
    for _ in iterator:
        pass
