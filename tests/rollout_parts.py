"""What rollout tests share: a config, prompts by position, a control store, a registry with scripted engines in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch.distributed as dist
from scripted_engine import VOCAB, ScriptedEngine, Serving

from megarl.config.schema import Config
from megarl.data.sample import Prompt
from megarl.rollout.dispatch import Decision, Dispatcher, Draws, wait_for_decision
from megarl.rollout.fleet import EngineRecord, Fleet, Registrar
from megarl.rollout.generate import Collected, Generator
from megarl.rollout.ledger import Announcements
from megarl.rollout.protocol import format_version

GENERATION = "test.0.abc"
VERSION = format_version(GENERATION, 0)
SEED = 17


def make_config(model: str = "none", *, need: int = 4, rollout: dict[str, Any] | None = None,
                cluster: dict[str, Any] | None = None, objective: dict[str, Any] | None = None,
                sglang: dict[str, Any] | None = None, sync: dict[str, Any] | None = None) -> Config:
    """A config with fast failure and `need` prompts a step; sections given are laid over it."""
    return Config.model_validate({
        "run": {"seed": SEED}, "model": {"path": model, "dtype": "fp32"},
        "data": {"sources": [{"path": "none"}], "prompts_per_step": need},
        "reward": {"terms": [{"name": "exact"}]}, "objective": objective or {},
        "sglang": sglang or {}, "sync": sync or {},
        "cluster": {"lease_timeout_s": 30.0, **(cluster or {})},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 6, "retries": 2, "no_engine_timeout_s": 1.0,
                    "request_timeout_s": 20.0, **(rollout or {})}})


def new_store() -> dist.TCPStore:
    """A control store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class NumberedPrompts:
    """The prompt at a position begins with the position (mod VOCAB) and names it."""

    def at(self, position: int) -> Prompt:
        """As `data.prompts.PromptStream`."""
        ids = np.array([position % VOCAB, 1, 2], np.int32)
        return Prompt(position, 0, position, "numbers", ids, text=str(position))


class Stage:
    """Scripted engines in a registry, and leaders that generate with them. A context manager.

    Args:
        engines: one per rollout rank.
        leaders: how many generators.
        config: as `make_config`.
        start: position of the first prompt.
        generator: further arguments of every Generator.
    """

    def __init__(self, engines: Iterable[ScriptedEngine], leaders: int = 1, config: Config | None = None,
                 start: int = 0, **generator: Any) -> None:
        self._exits = ExitStack()
        self.engines = list(engines)
        self.store = new_store()
        config = config or make_config()
        self.served = [self._exits.enter_context(Serving(engine)) for engine in self.engines]
        self.registrars = [Registrar(self.store, rank) for rank in range(len(self.engines))]
        self.records = [EngineRecord(f"{rank}.0", 1, served.url, "up") for rank, served in enumerate(self.served)]
        for registrar, record in zip(self.registrars, self.records, strict=True):
            registrar.beat()
            registrar.write(record)
        self.fleet, self.synced = self.new_fleet(config), list(self.records)
        self.sync(VERSION)
        draws = Draws(position=start)
        self.generators = [
            Generator(config, NumberedPrompts(), self.new_fleet(config), self.store, draws, generation=GENERATION,
                      leader_index=leader, leaders=leaders, vocab_size=VOCAB, decode=lambda ids: f"<{ids}>",
                      **generator) for leader in range(leaders)]
        self.dispatcher, self.ear = Dispatcher(config, self.store, draws), Announcements(self.store)

    def new_fleet(self, config: Config) -> Fleet:
        """A reader of the registry, as each leader has one."""
        return Fleet(self.store, len(self.engines), 1, config.cluster.lease_timeout_s)

    def sync(self, version: str) -> None:
        """As a publish of weights to all engines."""
        for engine in self.engines:
            engine.version = version
        self.fleet.mark_synced(version, [record for record in self.records if record in self.synced])

    def alive(self) -> None:
        """Raise what ended a leader's generation."""
        for generator in self.generators:
            generator.check()

    def decide(self, step: int) -> Decision:
        """What trainer 0 announces for `step`, which is open."""
        self.dispatcher.decide(step, self.alive)
        return wait_for_decision(self.ear, self.alive)

    def collect(self, step: int = 0) -> tuple[Decision, list[Collected]]:
        """A step: published, opened, decided and taken by all leaders."""
        version = format_version(GENERATION, step)
        self.sync(version)
        self.dispatcher.open(step, version)
        decision = self.decide(step)
        return decision, [generator.take(decision.numbers) for generator in self.generators]

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for generator in self.generators:
            generator.close()
        self._exits.close()


def in_loop(call: Any, timeout_s: float = 30.0) -> Any:
    """Run `call(session)` in an event loop."""
    from megarl.rollout.client import open_session

    async def run() -> Any:
        async with open_session() as session:
            return await asyncio.wait_for(call(session), timeout_s)

    return asyncio.run(run())
