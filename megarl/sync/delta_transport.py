"""The delta transport: only what changed since the version that an engine holds, over HTTP.

Each source keeps a copy of its stage's weights as they were sent last, in host memory. An engine that holds exactly
that version gets the changes; any other (a new one, one that was restarted) gets everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megarl.errors import MachineFault
from megarl.rollout.client import EngineClient
from megarl.rollout.fleet import EngineRecord
from megarl.rollout.protocol import EngineError
from megarl.sync import delta
from megarl.sync.background import all_well
from megarl.sync.crew import Crew, Targets
from megarl.sync.sets import EngineSet
from megarl.sync.transport import Sent, Tensors, run_out


class Delta:
    """Compares, packs and posts, to an endpoint of the engines' own.

    Args:
        crew: the trainers.
        is_source: whether this rank sends.
        dtype: in which the engines hold their weights.
        message_bytes: of one post, unless a single tensor is larger.
        timeout_s: of one post.
    """

    session = True

    def __init__(self, crew: Crew, *, is_source: bool, dtype: torch.dtype, message_bytes: int,
                 timeout_s: float) -> None:
        self._crew, self._is_source, self._dtype = crew, is_source, dtype
        self._message_bytes, self._timeout_s = message_bytes, timeout_s
        self._base = self._version = ""
        self._weights: dict[str, torch.Tensor] = {}
        self._changes: list[delta.Change] = []

    def prepare(self, version: str, tensors: Tensors) -> None:
        """Find what changed since the version before."""
        if version == self._version:
            return
        base, self._version = self._version, ""
        try:
            self._crew.together(lambda: self._compare(tensors))
        except BaseException:  # what is kept may be of two versions
            self._weights = {}
            raise
        self._base, self._version = base, version

    def _compare(self, tensors: Tensors) -> None:
        if not self._is_source:
            run_out(tensors())
            return
        self._changes = []
        gathered = tensors()
        try:
            for name, tensor in gathered:
                new = tensor.detach().to("cpu", copy=True).contiguous()
                self._changes.append(self._change(name, new))
                self._weights[name] = new
        finally:
            run_out(gathered)

    def _change(self, name: str, new: torch.Tensor) -> delta.Change:
        """Differences of bits only where the engine holds these bits, not a cast of them."""
        old = self._weights.get(name)
        change = None if old is None else delta.compare(name, new, old)
        return delta.whole(name, new) if change is None or (
            change.kind == "sparse" and new.dtype != self._dtype) else change

    def connect(self, targets: Targets) -> None:
        """Every post is a connection: nothing."""

    def send(self, targets: Targets, tensors: Tensors) -> Sent:
        """Changes to those who hold the version before, everything to the others."""
        fit = [engine for engine in targets.engines if self._base and targets.held.get(engine.key) == self._base]
        return self._crew.per_set(targets, lambda failed: self._post(targets, fit, failed))

    def _post(self, targets: Targets, fit: list[EngineRecord], failed: dict[int, str]) -> Sent:
        if not self._is_source:
            return Sent()
        keys = {engine.key for engine in fit}
        size = 0
        for chosen, changes, base in (
                (True, self._changes, self._base),
                (False, (delta.whole(name, tensor) for name, tensor in self._weights.items()), None)):
            sets = [EngineSet(one.number, tuple(engine for engine in one.engines if (engine.key in keys) == chosen))
                    for one in targets.sets]
            sets = [one for one in sets if one.engines and one.number not in failed]
            if sets:
                size = max(size, self._post_all(sets, changes, base, failed))
        return Sent(len(self._weights), size)

    def _post_all(self, sets: Sequence[EngineSet], changes: Iterable[delta.Change], base: str | None,
                  failed: dict[int, str]) -> int:
        """The same messages to all of these; a set that fails gets no more. Returns the bytes sent to each."""
        size = 0

        async def post(one: EngineSet, message: bytes) -> None:
            try:
                await all_well([self._crew.client(engine).update_from_delta(message, timeout_s=self._timeout_s)
                                for engine in one.engines], "take what changed")
            except MachineFault as error:
                failed[one.number] = str(error)

        async def post_to_all(message: bytes) -> None:
            await asyncio.gather(*(post(one, message) for one in sets if one.number not in failed))

        for message in delta.messages(changes, base, self._message_bytes):
            self._crew.loop.run(post_to_all(message))
            size += len(message)
        return size

    def leave(self, sets: Sequence[EngineSet], engines: Collection[EngineRecord]) -> None:
        """Nothing was made."""

    def close(self) -> None:
        """Nothing was made."""


class Relayed(Delta):
    """For engines that load whole checkpoints only: their relays take the changes, while the engines still generate;
    then the engines load what their relays have.

    Args:
        load_format: of SGLang, None: as it is configured.
    """

    session = False

    def __init__(self, crew: Crew, *, load_format: str | None, **common: Any) -> None:
        super().__init__(crew, **common)
        self._load_format, self._sent = load_format, Sent()
        self._paths: dict[str, str] = {}

    def connect(self, targets: Targets) -> None:
        """Bring the relays to the prepared version."""
        crew, members = self._crew, targets.sets
        sets = [EngineSet(one.number, tuple(replace(engine, url=engine.relay) for engine in one.engines))
                for one in members]
        answers = crew.from_zero(crew.together(lambda: self._ask(sets) if crew.is_zero else {}))
        relays = Targets(sets, {key: held for key, (_, held, _) in answers.items()})
        for one in members:
            for engine in one.engines:
                self._paths[engine.url], _, failure = answers[engine.key]
                if failure:
                    relays.failed[one.number] = failure
        crew.tell(relays, EngineClient.begin_update, "begin an update of the relays")
        self._sent = super().send(relays, lambda: iter(()))
        crew.tell(relays, EngineClient.end_update, "end the update of the relays")
        crew.tell(relays, lambda client: client.set_version(self._version), "name what the relays hold")
        targets.failed.update(relays.failed)

    def _ask(self, sets: Sequence[EngineSet]) -> dict[tuple[str, int], tuple[str, str, str]]:
        """(directory, version, why it does not answer) of each relay."""
        relays = [relay for one in sets for relay in one.engines]
        return {relay.key: ("", "", str(answer)) if isinstance(answer, EngineError)
                else (answer.model_path, answer.weight_version, "")
                for relay, answer in zip(relays, self._crew.ask(relays, EngineClient.model_info), strict=True)}

    def send(self, targets: Targets, tensors: Tensors) -> Sent:
        """Have the engines load it."""
        self._crew.tell(targets, lambda client: client.update_from_disk(
            self._paths[client.url], load_format=self._load_format, timeout_s=self._timeout_s), "load from the relays")
        return self._sent
