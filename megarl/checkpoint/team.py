"""Several processes that do a file job together: shares, and one error for all."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megarl.errors import EXIT_BUG, MegarlError

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Processes that torchrun has started, or one that it has not.

    Attributes:
        rank, size: this process, of how many.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    @contextmanager
    def from_environment(cls) -> Iterator[Team]:
        """By torchrun's variables; they need not have an accelerator."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            yield cls()
            return
        dist.init_process_group("gloo", timeout=datetime.timedelta(hours=6))  # others' shares may take longer
        try:
            yield cls(dist.get_rank(), size)
        finally:  # also after an error that all agreed on: gloo's threads abort a process that ends without this
            dist.destroy_process_group()

    def each(self, work: Callable[[], T]) -> T:
        """Do `work` on all of them; returns this one's result.

        If it fails anywhere, the first that failed raises its error and the others leave with its status, silently:
        what is wrong is told once.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        if self.size > 1:
            self._agree(error)
        return result

    def _agree(self, error: Exception | None) -> None:
        statuses: list[int | None] = [None] * self.size
        dist.all_gather_object(statuses, error and (error.status if isinstance(error, MegarlError) else EXIT_BUG))
        failed = [rank for rank, status in enumerate(statuses) if status is not None]
        if failed and failed[0] == self.rank:
            raise error
        if failed:
            sys.exit(statuses[failed[0]])

    def first(self, work: Callable[[], T]) -> T | None:
        """Do `work` on the first one while the others wait; returns its result there, None elsewhere."""
        return self.each(lambda: work() if self.rank == 0 else None)

    def gather(self, mine: T) -> list[T]:
        """Everyone's, in the order of ranks."""
        found: list[Any] = [mine]
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, mine)
        return found


def shared_out(sizes: list[int], team: Team) -> list[int]:
    """Which of some jobs of these sizes are this process's: the largest first, each to whoever has least."""
    loads, mine = [0] * team.size, []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        if rank == team.rank:
            mine.append(number)
    return sorted(mine)
