"""Continuous batching: sequences enter free slots at every step, leave when they are done, and rows stay dense."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from megarl.rollout.embedded.cache import Computed, aligned
from megarl.rollout.embedded.decoder import Decoder, Prompts
from megarl.rollout.embedded.prefixes import PrefixCache
from megarl.rollout.embedded.requests import Group, Sequence
from megarl.rollout.embedded.sampler import sample, uniforms
from megarl.rollout.embedded.slots import SlotTable
from megarl.rollout.embedded.text import Text

PREFILL_TOKENS = 4096  # in one forward pass, unless a single prompt is longer
ABORTED = {"type": "abort", "message": "Aborted by AbortReq."}
NOT_FINITE = {"type": "abort", "message": "The model's logits are not finite."}


class Scheduler:
    """Decodes sequences to their ends. Not thread-safe: everything runs on one thread.

    Args:
        decoder: the model.
        slots: sequences decoded together.
        eos_ids: end-of-sequence tokens, for requests without ignore_eos.
        text: for stop strings.
        prefix_tokens: of finished sequences whose keys and values are kept for prompts that begin with them.

    A sequence's tokens and log-probs are a function of weights, prompt, parameters and seed. The others in the batch
    do not matter, nor does when it entered; after a retraction, and where a prompt begins with a finished sequence that
    is kept, keys and values come from another computation of the same numbers, which may round otherwise. What is kept
    depends on what else was asked, within `prefix_tokens`.

    Attributes:
        version: name of the current weights; change it by `set_version`.
        prefilled_tokens, generated_tokens: prompt tokens computed, and tokens sampled, since the start.
    """

    def __init__(self, decoder: Decoder, slots: int, eos_ids: tuple[int, ...], text: Text | None, version: str,
                 prefix_tokens: int = 0) -> None:
        self._decoder, self._eos_ids, self._text = decoder, eos_ids, text
        self._cache = decoder.new_cache(slots)
        self._table = SlotTable(aligned(slots), slots)
        self._waiting: deque[Sequence] = deque()
        self._prefixes, self._era = PrefixCache(prefix_tokens), 0
        self.version = version
        self.prefilled_tokens = self.generated_tokens = 0

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return len(self._table.live())

    @property
    def waiting(self) -> int:
        """Sequences that no slot has been found for yet."""
        return len(self._waiting)

    def submit(self, group: Group) -> None:
        """Queue all samples of a group."""
        self._waiting.extend(group.sequences)

    def abort(self, wanted: Callable[[Sequence], bool]) -> None:
        """Finish the wanted sequences now; what they have is kept."""
        for sequence in [sequence for sequence in self._waiting if wanted(sequence)]:
            self._waiting.remove(sequence)
            self._finish(sequence, ABORTED)
        for slot in self._table.live().tolist():
            if wanted(self._table.sequences[slot]):
                self._leave(slot, ABORTED)

    def retract(self) -> None:
        """Put all running sequences back at the head of the queue; their keys and values will be computed anew."""
        for slot in reversed(self._table.live().tolist()):
            sequence = self._table.empty(slot)
            sequence.mark(self.version, len(sequence.output_ids))
            sequence.retractions += 1
            self._waiting.appendleft(sequence)
        self.forget()

    def forget(self) -> None:
        """Drop prompts that were computed for samples still waiting, and finished sequences; slots keep their keys and
        values."""
        self._prefixes.clear()
        self._era += 1
        for sequence in self._waiting:
            sequence.group.prefix = None

    def flush(self) -> bool:
        """Drop all keys and values; False, and nothing is dropped, if sequences are in slots."""
        if self.running:
            return False
        self.forget()
        self._cache.drop()
        return True

    def set_version(self, version: str) -> None:
        """Tokens from now on are of this version."""
        for slot in self._table.live().tolist():
            self._table.sequences[slot].mark(self.version, int(self._table.counts[slot]))
        self.version = version

    def step(self) -> bool:
        """Admit what fits and decode one token of every running sequence; False if there was nothing to do."""
        self._admit()
        table = self._table
        live = table.live()
        if not len(live):
            return False
        live = self._compact(live)
        rows = aligned(int(live[-1]) + 1)
        positions_r = table.positions[:rows]
        logits_rv = self._decoder.decode(torch.from_numpy(table.tokens[:rows]), torch.from_numpy(positions_r),
                                         self._cache, aligned(int(positions_r.max()) + 1))
        tokens_r, logprobs_r = sample(
            logits_rv, table.temperature[:rows], table.top_p[:rows], table.top_k[:rows], table.min_p[:rows],
            uniforms(table.seed_keys[:rows], positions_r.astype(np.uint64) + np.uint64(1)))
        self._take(live, tokens_r[live], logprobs_r[live])
        return True

    def _take(self, live: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append one token to each live slot and finish the sequences that end with it.

        A stop token that is also the last one allowed counts as a stop (SGLang: as length).
        """
        table = self._table
        counts = table.counts[live]
        finite = np.isfinite(logprobs)
        table.out_ids[live, counts], table.out_logprobs[live, counts] = tokens, logprobs
        table.tokens[live] = tokens
        table.positions[live] += 1
        table.counts[live] = counts + finite
        self.generated_tokens += len(live)
        stopped = (tokens[:, None] == table.stop_ids[live]).any(1)
        ended = stopped | ~finite | (counts + 1 >= table.limits[live])
        words = {slot: self._stop_string(slot) for slot in table.watched}
        for at in np.flatnonzero(ended | np.array([words.get(slot) is not None for slot in live.tolist()])).tolist():
            slot = int(live[at])
            if not finite[at]:
                finish = NOT_FINITE
            elif stopped[at]:
                finish = {"type": "stop", "matched": int(tokens[at])}
            elif words.get(slot) is not None:
                finish = {"type": "stop", "matched": words[slot]}
            else:
                finish = {"type": "length", "length": int(table.limits[slot])}
            self._leave(slot, finish)
            if not finite[at]:
                self._cache.clear(slot)  # a masked NaN would still reach the slot's next sequence

    def _stop_string(self, slot: int) -> str | None:
        table = self._table
        return self._text.find_stop(table.out_ids[slot, :table.counts[slot]], table.sequences[slot].group.params.stop)

    def _leave(self, slot: int, finish: dict) -> None:
        """Finish the sequence in a slot."""
        sequence = self._table.empty(slot)
        start, tokens = sequence.group.routed_from, len(sequence.group.prompt_ids) + len(sequence.output_ids)
        if start is not None:  # the newest token has not been computed
            sequence.routed = self._cache.experts(slot, start, max(start, tokens - 1))
        if self._prefixes.room and finish is not NOT_FINITE and sequence.era == self._era:
            done = np.concatenate([sequence.group.prompt_ids, sequence.output_ids])[:-1]
            self._prefixes.keep(done, self._cache.take(slot, len(done)))
        self._finish(sequence, finish)

    def _finish(self, sequence: Sequence, finish: dict) -> None:
        sequence.finish, sequence.version = finish, self.version
        sequence.mark(self.version, len(sequence.output_ids))
        group = sequence.group
        group.unfinished -= 1
        if not group.unfinished and group.on_done is not None:
            group.on_done(group)

    def _compact(self, live: np.ndarray) -> np.ndarray:
        """Move sequences down where that saves a block of rows; returns the live slots afterwards."""
        rows = aligned(len(live))
        if aligned(int(live[-1]) + 1) == rows:
            return live
        sources = live[live >= rows].tolist()
        targets = self._table.free()[:len(sources)]
        self._cache.move(sources, targets, aligned(int(self._table.positions[sources].max()) + 1))
        self._table.move(sources, targets)
        return self._table.live()

    def _admit(self) -> None:
        """Fill free slots from the queue, in order."""
        if not self._waiting:
            return
        newcomers: dict[tuple[int, ...], list[tuple[int, Sequence]]] = {}  # those of one key share a prefix
        for slot in self._table.free()[:len(self._waiting)]:
            sequence = self._waiting.popleft()
            self._table.fill(slot, sequence, self._stop_ids(sequence))
            sequence.era = self._era
            key = (id(sequence),) if len(sequence.output_ids) else (id(sequence.group), 0)
            newcomers.setdefault(key, []).append((slot, sequence))
        todo = []
        for members in newcomers.values():
            sequence = members[0][1]
            if len(sequence.output_ids) == 0 and sequence.group.prefix is not None:
                self._place(members, sequence.group.prefix)
                continue
            tokens = np.concatenate([sequence.group.prompt_ids, sequence.output_ids])[:-1]
            past = self._prefixes.find(tokens) if len(sequence.output_ids) == 0 else None
            if past is not None:
                sequence.cached_tokens = len(past)
            if past is not None and len(past) == len(tokens):
                self._share(members, past)
            elif len(tokens):
                todo.append((tokens[0 if past is None else len(past):], members, past))
        todo.sort(key=lambda item: len(item[0]))
        while todo:
            count = 1
            while count < len(todo) and sum(aligned(len(item[0])) for item in todo[:count + 1]) <= PREFILL_TOKENS:
                count += 1
            self._prefill(todo[:count])
            todo = todo[count:]

    def _prefill(self, todo: list[tuple[np.ndarray, list[tuple[int, Sequence]], Computed | None]]) -> None:
        """Compute keys and values of tokens, perhaps behind others, and copy them into the slots of those who share
        them."""
        lengths = [aligned(len(tokens)) for tokens, _, _ in todo]
        packed = np.zeros(sum(lengths), np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        parts: list[Prompts] = []
        for (tokens, _, past), start, length in zip(todo, starts, lengths, strict=False):
            packed[start:start + len(tokens)] = tokens
            if parts and parts[-1].length == length and past is None and parts[-1].past is None:
                parts[-1] = Prompts(parts[-1].start, parts[-1].count + 1, length)
            else:
                parts.append(Prompts(int(start), 1, length, past))
            self.prefilled_tokens += len(tokens)
        computed = self._decoder.prefill(torch.from_numpy(packed), parts)
        for (tokens, members, past), start in zip(todo, starts, strict=False):
            new = computed.cut(start, start + len(tokens))
            self._share(members, new if past is None else past.then(new))

    def _share(self, members: list[tuple[int, Sequence]], prefix: Computed) -> None:
        """Give a group's samples the prompt that was computed for the first of them."""
        self._place(members, prefix)
        first, *others = (sequence for _, sequence in members)
        for sequence in others:
            sequence.cached_tokens = len(prefix)
        if self._waiting and self._waiting[0].group is first.group and not len(self._waiting[0].output_ids):
            first.group.prefix = prefix.clone()

    def _place(self, members: list[tuple[int, Sequence]], prefix: Computed) -> None:
        tokens = len(prefix)
        self._cache.reserve(tokens + 1)
        self._cache.place([slot for slot, _ in members], prefix)
        group = members[0][1].group
        if prefix is group.prefix:
            for _, sequence in members:
                sequence.cached_tokens = tokens
            if not self._waiting or self._waiting[0].group is not group:
                group.prefix = None

    def _stop_ids(self, sequence: Sequence) -> list[int]:
        """As in SGLang, ignore_eos also turns the request's own stop tokens off."""
        params = sequence.group.params
        return [] if params.ignore_eos else [*self._eos_ids, *params.stop_token_ids]
