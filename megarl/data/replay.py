"""Taking experiences from files instead of engines (debug.replay_experience)."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster.groups import Groups
from megarl.data.buffer import Taken
from megarl.data.dump import joined, read_parts
from megarl.data.exchange import gather_table
from megarl.data.ragged import SampleBatch
from megarl.errors import UserMistake


class ReplayBuffer:
    """Hands out what `data.dump` has written, step by step. Collective over the trainers, like `ExperienceBuffer`.

    Args:
        folder: of the experiences; every trainer must see it.
        groups: this trainer's groups, as many leaders as there may be now.
        vocab: of the model that is trained.
    """

    def __init__(self, folder: Path, groups: Groups, vocab: int) -> None:
        self._folder, self._groups, self._vocab = folder, groups, vocab

    def take(self, step: int) -> Taken:
        """The samples of `step` (from 0), as they were trained on.

        Raises:
            UserMistake: they are not there or damaged, or of a model with another vocabulary.
        """
        groups = self._groups
        first = read_parts(self._folder, step + 1, 0, 2**31)[0]  # part 0, for what all trainers must know
        local = None
        if groups.is_leader:
            local = joined(read_parts(self._folder, step + 1, groups.dp, groups.layout.data))
            local = SampleBatch.from_groups([]) if local is None else local
        largest = max(int(one.tokens.max(initial=0)) for one in (first.samples, local) if one is not None)
        if largest >= self._vocab:
            raise UserMistake(f"a sample of step {step + 1} has token {largest}, the model has {self._vocab}",
                              str(self._folder), "name the model that sampled it in model.path")
        table = gather_table(local, groups)
        return Taken(local, [], table, first.position, first.unfinished, first.metrics)
