"""Finished conversations whose keys and values are kept, for the next turn that begins with them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from megarl.rollout.embedded.cache import Computed


class PrefixCache:
    """Whole sequences, the one used least recently is dropped first. Not thread-safe.

    A sequence serves a prompt that begins with all of its tokens, and none that shares a part of them: so prompts of
    one turn, which begin with nobody's answer, are computed in one way whatever was asked before.

    Args:
        room: tokens in all; 0 keeps nothing.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.tokens = 0  # kept now
        self._kept: OrderedDict[bytes, Computed] = OrderedDict()
        self._lengths: dict[int, int] = {}  # tokens -> how many sequences have so many

    def keep(self, tokens: np.ndarray, computed: Computed) -> None:
        """Keep what was computed of all of `tokens`, int64; nothing if they are more than there is room for."""
        key = tokens.tobytes()
        if not 0 < len(tokens) <= self.room or key in self._kept:
            return
        while self.tokens + len(tokens) > self.room:
            self._drop(next(iter(self._kept)))
        self._kept[key] = computed
        self.tokens += len(tokens)
        self._lengths[len(tokens)] = self._lengths.get(len(tokens), 0) + 1

    def find(self, tokens: np.ndarray) -> Computed | None:
        """What was computed of the longest sequence that `tokens`, int64, begin with."""
        for length in sorted((length for length in self._lengths if length <= len(tokens)), reverse=True):
            key = tokens[:length].tobytes()
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return None

    def clear(self) -> None:
        """Keep nothing of what there is."""
        self._kept.clear()
        self._lengths.clear()
        self.tokens = 0

    def _drop(self, key: bytes) -> None:
        length = len(self._kept.pop(key))
        self.tokens -= length
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
