"""The prompts of a run: any draw by its number, so that all there is to save and restore is one integer.

*Sources.* Draw d belongs to the source that `draws_before` says: at every d each source has had its share of the draws
by weight, to within the number of sources; two equal sources alternate. Every step sees the same mixture.

*Epochs* are counted per source. A source's draws go through all its prompts once in each of its epochs, in a new order
each time (a hash of seed, source, epoch and row; the file's order without shuffle). With sources of different size or
weight their epochs end at different draws: a small source with a large weight is repeated sooner. Prompts above
`data.max_prompt_tokens` are left out of every epoch.

A source is tokenised in the order of its first epoch, a little ahead of the draws; tokens are kept in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megarl.config.schema import DataConfig, EvalSetConfig, SourceConfig
from megarl.data.encode import Encoder
from megarl.data.rows import open_rows
from megarl.data.sample import Prompt, sample_seed
from megarl.errors import UserMistake

_CHUNK = 32  # prompts tokenised before the background thread looks around


@dataclass(frozen=True)
class SourceReport:
    """What the length filter did to a source so far.

    Attributes:
        name, path: of the source.
        rows: in the file; `scanned` of them are tokenised.
        dropped: longer than the limit, of those scanned.
        longest: tokens of the longest prompt scanned, and `longest_where` it is.
        limit: data.max_prompt_tokens.
    """

    name: str
    path: str
    rows: int
    scanned: int
    dropped: int
    longest: int
    longest_where: str
    limit: int

    def describe(self) -> str:
        """One line, e.g. `gsm8k: 3 of 7473 prompts dropped, longer than 1024 tokens (longest 1398: x.jsonl line 8)`."""
        so_far = "" if self.scanned == self.rows else f" of the first {self.scanned}"
        return (f"{self.name}: {self.dropped} of {self.rows} prompts dropped{so_far}, longer than {self.limit} tokens "
                f"(longest {self.longest}: {self.longest_where})")


def draws_before(position: int, weights: Sequence[float]) -> list[int]:
    """How many of the first `position` draws each source has had; exact rational arithmetic on the weights.

    The first source gets the floor of its share, the others divide what is left in the same way, so each further draw
    adds one to exactly one count.
    """
    counts, left = [], position
    shares = [Fraction(weight) for weight in weights]
    rest = sum(shares)
    for share in shares:
        count = int(left * share / rest)
        counts.append(count)
        left -= count
        rest -= share
    return counts


def source_of(position: int, weights: Sequence[float]) -> int:
    """The number of the source that draw `position` belongs to."""
    before, after = (draws_before(position + one, weights) for one in (0, 1))
    return next(number for number, count in enumerate(before) if after[number] > count)


def shuffled(count: int, seed: int, stream: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), int64: the rows sorted by a hash, the same for every version of numpy.

    SplitMix64 (see data.sample.sample_seed) of the row number, keyed by seed, stream and epoch.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(sample_seed(seed, stream, epoch)) + np.arange(count, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return np.argsort(state, kind="stable")


class _Source:
    """One file of prompts, tokenised as far as it was needed. Not thread-safe: the stream holds a lock."""

    def __init__(self, config: SourceConfig, number: int, data: DataConfig, encoder: Encoder, seed: int) -> None:
        self.config, self.number, self.data, self.seed = config, number, data, seed
        self.name = config.name or Path(config.path).stem
        self.encoder = encoder
        columns = [config.prompt, config.label] if config.label else [config.prompt]
        self.rows = open_rows(config.path, columns, f"data.sources.{number}")
        self.tokens: dict[int, np.ndarray] = {}
        self.kept: list[int] = []  # rows in the order of epoch 0
        self.scanned, self.dropped, self.longest, self.longest_row = 0, 0, -1, 0
        self.orders: dict[int, np.ndarray] = {0: self._order(0)}

    @property
    def complete(self) -> bool:
        return self.scanned == len(self.rows)

    def scan(self, kept: int) -> None:
        """Tokenise until so many prompts are kept, or all rows are seen."""
        while len(self.kept) < kept and not self.complete:
            row = int(self.orders[0][self.scanned])
            ids = self.encoder.encode(self.rows[row][self.config.prompt], self.rows.where(row))
            if len(ids) > self.longest:
                self.longest, self.longest_row = len(ids), row
            if len(ids) <= self.data.max_prompt_tokens:
                self.tokens[row] = ids
                self.kept.append(row)
            elif self.data.on_long_prompt == "error":
                raise UserMistake(f"the prompt has {len(ids)} tokens, above data.max_prompt_tokens "
                                  f"({self.data.max_prompt_tokens})", self.rows.where(row),
                                  "raise it, shorten the prompt, or set data.on_long_prompt: drop")
            else:
                self.dropped += 1
            self.scanned += 1
        if self.complete and not self.kept:
            raise UserMistake(f"all {len(self.rows)} prompts are longer than data.max_prompt_tokens "
                              f"({self.data.max_prompt_tokens}); the longest has {self.longest} tokens",
                              self.config.path, "raise it")

    def draw(self, number: int) -> tuple[int, int]:
        """(epoch, row) of the source's draw `number`."""
        self.scan(number + 1)
        if number < len(self.kept):
            return 0, self.kept[number]
        epoch, place = divmod(number, len(self.kept))
        if epoch not in self.orders:
            order = self._order(epoch)
            mask = np.zeros(len(self.rows), bool)
            mask[self.kept] = True
            self.orders[epoch] = order[mask[order]]
            for old in sorted(self.orders)[1:-2]:
                del self.orders[old]  # keeps epoch 0 and two more
        return epoch, int(self.orders[epoch][place])

    def report(self) -> SourceReport:
        return SourceReport(self.name, self.config.path, len(self.rows), self.scanned, self.dropped,
                            max(self.longest, 0), self.rows.where(self.longest_row), self.data.max_prompt_tokens)

    def _order(self, epoch: int) -> np.ndarray:
        if self.data.shuffle:
            return shuffled(len(self.rows), self.seed, self.number, epoch)
        return np.arange(len(self.rows))


class PromptStream:
    """Random access to the training prompts: `at(position)` is a function of data, config, seed and position.

    Files are opened and checked when it is made. A thread tokenises `ahead` draws further than the furthest one asked
    for; close the stream (or use it in a `with`) to end it.

    Args:
        config: sources, limits and the chat template.
        tokenizer: a transformers tokenizer.
        seed: of the shuffles.
        start: the first position that will be asked for; the look-ahead begins there.
        ahead: bound of the look-ahead, draws; four steps' prompts by default.
    Raises:
        UserMistake: a file that cannot be used; with on_long_prompt "error", a long prompt anywhere.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, seed: int, *, start: int = 0,
                 ahead: int | None = None) -> None:
        self._weights = [source.weight for source in config.sources]
        encoder = Encoder(tokenizer, config)
        self._sources = [_Source(source, number, config, encoder, seed)
                         for number, source in enumerate(config.sources)]
        for source in self._sources:
            source.scan(len(source.rows) if config.on_long_prompt == "error" else 1)
        self._ahead = 4 * config.prompts_per_step if ahead is None else ahead
        self._changed = threading.Condition()
        self._furthest, self._closed = start, False
        self._failure: UserMistake | None = None
        self._thread = threading.Thread(target=self._tokenize_ahead, name="tokenize-ahead", daemon=True)
        self._thread.start()

    def at(self, position: int) -> Prompt:
        """The prompt of draw `position` (from 0); tokenised here and now if the thread has not got so far.

        Raises:
            UserMistake: a row that cannot be used, naming its file and line; also one that the look-ahead came upon.
        """
        if position < 0:
            raise ValueError(f"position {position}")
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if position > self._furthest:
                self._furthest = position
                self._changed.notify_all()
            chosen = source_of(position, self._weights)
            source = self._sources[chosen]
            epoch, row = source.draw(draws_before(position, self._weights)[chosen])
            return _prompt(source.rows[row], position, epoch, row, source.name, source.tokens[row],
                           source.config.prompt, source.config.label)

    def report(self) -> list[SourceReport]:
        """What the length filter did so far, by source."""
        with self._changed:
            return [source.report() for source in self._sources]

    def close(self) -> None:
        """End the thread; `at` still works after it, without look-ahead."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> PromptStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _tokenize_ahead(self) -> None:
        while True:
            with self._changed:
                work = self._next_work()
                while work is None and not self._closed:
                    self._changed.wait()
                    work = self._next_work()
                if self._closed:
                    return
                source, kept = work
                try:
                    source.scan(min(kept, len(source.kept) + _CHUNK))
                except UserMistake as mistake:
                    self._failure = mistake  # `at` raises it
                    return

    def _next_work(self) -> tuple[_Source, int] | None:
        """A source whose kept prompts do not reach the look-ahead, and how many it should have."""
        wanted = draws_before(self._furthest + 1 + self._ahead, self._weights)
        for source, kept in zip(self._sources, wanted, strict=True):
            if len(source.kept) < kept and not source.complete:
                return source, kept
        return None


def load_eval_set(eval_set: EvalSetConfig, tokenizer: Any, data: DataConfig) -> list[Prompt]:
    """The first `limit` prompts of a held-out set, in the file's order; position = index = row.

    Args:
        eval_set: the file and its columns.
        tokenizer: a transformers tokenizer.
        data: how training prompts are made into tokens, and their limit.
    Raises:
        UserMistake: a file or row that cannot be used; a prompt above data.max_prompt_tokens (leaving it out would
            change what is measured).
    """
    columns = [eval_set.prompt, eval_set.label] if eval_set.label else [eval_set.prompt]
    rows = open_rows(eval_set.path, columns, "eval.sets")
    encoder, name = Encoder(tokenizer, data), eval_set.name or Path(eval_set.path).stem
    prompts = []
    for index in range(min(len(rows), eval_set.limit or len(rows))):
        row = rows[index]
        ids = encoder.encode(row[eval_set.prompt], rows.where(index))
        if len(ids) > data.max_prompt_tokens:
            raise UserMistake(f"the prompt has {len(ids)} tokens, above data.max_prompt_tokens "
                              f"({data.max_prompt_tokens})", rows.where(index), "raise it, or remove the row")
        prompts.append(_prompt(row, index, 0, index, name, ids, eval_set.prompt, eval_set.label))
    return prompts


def _prompt(row: dict[str, Any], position: int, epoch: int, index: int, source: str, ids: np.ndarray,
            prompt_column: str, label_column: str) -> Prompt:
    extra = {name: value for name, value in row.items() if name not in (prompt_column, label_column)}
    return Prompt(position=position, epoch=epoch, index=index, source=source, token_ids=ids,
                  label=row[label_column] if label_column else None, text=row[prompt_column], extra=extra)
