"""What the decode step needs to know of each slot, as arrays, so that no step loops over rows in Python."""

from __future__ import annotations

import numpy as np

from megarl.rollout.embedded.requests import Sequence
from megarl.rollout.embedded.sampler import OFF_TOP_K, seed_keys


class SlotTable:
    """Arrays over slots [rows]; a free slot holds harmless values and is decoded along with the others.

    Attributes:
        tokens, positions: int64, the newest token and where it stands in its sequence.
        counts, limits: int64, output tokens so far and at most.
        seed_keys: uint64. temperature: float32. top_p, min_p: float64. top_k: int64.
        stop_ids: int64 [rows, width], filled up with -1.
        out_ids: int64 [rows, room], out_logprobs: float32 [rows, room].
        sequences: the sequence in each slot, or None.
    """

    _ARRAYS = ("tokens", "positions", "counts", "limits", "seed_keys", "temperature", "top_p", "top_k", "min_p",
               "stop_ids", "out_ids", "out_logprobs")

    def __init__(self, rows: int, usable: int) -> None:
        self.usable = usable
        self._taken = np.zeros(rows, bool)
        self.sequences: list[Sequence | None] = [None] * rows
        self.tokens, self.positions, self.counts, self.limits, self.top_k = np.zeros((5, rows), np.int64)
        self.seed_keys = np.zeros(rows, np.uint64)
        self.temperature = np.ones(rows, np.float32)
        self.top_p, self.min_p = np.ones(rows), np.zeros(rows)
        self.top_k[:] = OFF_TOP_K
        self.stop_ids = np.full((rows, 4), -1, np.int64)
        self.out_ids, self.out_logprobs = np.zeros((rows, 0), np.int64), np.zeros((rows, 0), np.float32)
        self.watched: set[int] = set()  # slots with stop strings

    def live(self) -> np.ndarray:
        """Numbers of the taken slots, ascending, int64."""
        return np.flatnonzero(self._taken)

    def free(self) -> list[int]:
        """Numbers of the free slots, ascending."""
        return np.flatnonzero(~self._taken[:self.usable]).tolist()

    def fill(self, slot: int, sequence: Sequence, stop_ids: list[int]) -> None:
        """Put a sequence, perhaps with some output already, into a free slot."""
        params, prompt, done = sequence.group.params, sequence.group.prompt_ids, len(sequence.output_ids)
        self.out_ids = _wider(self.out_ids, params.max_new_tokens, 0)
        self.out_logprobs = _wider(self.out_logprobs, params.max_new_tokens, 0)
        self.stop_ids = _wider(self.stop_ids, len(stop_ids), -1)
        self.sequences[slot], self._taken[slot] = sequence, True
        self.tokens[slot] = sequence.output_ids[-1] if done else prompt[-1]
        self.positions[slot] = len(prompt) + done - 1
        self.counts[slot], self.limits[slot] = done, params.max_new_tokens
        self.seed_keys[slot] = seed_keys(np.array(sequence.seed, np.uint64)[None])[0]
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = params.temperature, params.top_p, params.min_p
        self.top_k[slot] = OFF_TOP_K if params.top_k == -1 else min(params.top_k, OFF_TOP_K)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :len(stop_ids)] = stop_ids
        self.out_ids[slot, :done], self.out_logprobs[slot, :done] = sequence.output_ids, sequence.logprobs
        if params.stop:
            self.watched.add(slot)

    def empty(self, slot: int) -> Sequence:
        """Take the sequence out of a slot, its output so far written into it."""
        sequence, count = self.sequences[slot], int(self.counts[slot])
        sequence.output_ids = self.out_ids[slot, :count].copy()
        sequence.logprobs = self.out_logprobs[slot, :count].copy()
        self.sequences[slot], self._taken[slot] = None, False
        self.watched.discard(slot)
        self.tokens[slot] = self.positions[slot] = 0
        self.temperature[slot] = self.top_p[slot] = 1
        self.top_k[slot], self.min_p[slot] = OFF_TOP_K, 0
        return sequence

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move sequences to free slots; their old slots become free."""
        for name in self._ARRAYS:
            array = getattr(self, name)
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target], self._taken[target] = self.sequences[source], True
            if source in self.watched:
                self.watched.add(target)
            self.empty(source)


def _wider(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    """The same rows with room for at least `width` columns."""
    if width <= array.shape[1]:
        return array
    extra = max(width, 2 * array.shape[1]) - array.shape[1]
    return np.pad(array, ((0, 0), (0, extra)), constant_values=fill)
