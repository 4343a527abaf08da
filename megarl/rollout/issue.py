"""One request to the fleet: choose an engine, ask, check the answer, ask another one if it failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np

from megarl.config.schema import Config
from megarl.data.routing import RoutingShape
from megarl.data.sample import Group, Prompt, Sample
from megarl.errors import MachineFault, UserMistake
from megarl.rollout.balance import Balancer
from megarl.rollout.client import EngineClient, EngineFailed, EngineLost, EngineRefused, EngineTimeout, backoff_s
from megarl.rollout.fleet import EngineRecord, Fleet
from megarl.rollout.protocol import (
    BadAnswer,
    Completion,
    EngineError,
    Expected,
    GenerateRequest,
    Sampling,
    WrongVersion,
)

log = logging.getLogger(__name__)

REGISTRY_AGE_S = 0.2
ABORT_TIMEOUT_S = 5.0
WATCH_S = 1.0  # between looks whether an engine that is asked is still there


class Aborted(EngineError):
    """The engine ended the request before its time."""

    reason = "aborted"


# What another attempt may cure. EngineRefused is not among them: the same request would be refused again.
CURABLE = (EngineLost, EngineFailed, BadAnswer, WrongVersion, Aborted)


@dataclass(frozen=True)
class Work:
    """What all groups of one collection have in common.

    Attributes:
        sampling: parameters of the request, `n` included.
        expected: which weights may answer; None accepts any.
        counts: additive counters of this leader, filled while the work goes on.
        resumes: an answer that the engine aborted is taken as a beginning, and continued by a further request.
        routing: of the model, if the engines' routing is replayed in training: completions then bring their experts.
    """

    sampling: Sampling
    expected: Expected | None
    counts: Counter[str]
    resumes: bool = False
    routing: RoutingShape | None = None


class Issuer:
    """Gets groups from engines; lives in one event loop.

    Args:
        config: `rollout` (retries, timeouts, which engine).
        fleet: where engines are found.
        session: from `client.open_session`.
        rid_prefix: unique to this leader in this life of the job.
        leader_index, leaders: which leader this is, of how many that ask the same engines.
        vocab_size: token ids are below it.
        decode: token ids -> text without special tokens; for rewards and records only.
    """

    def __init__(self, config: Config, fleet: Fleet, session: aiohttp.ClientSession, *, rid_prefix: str,
                 leader_index: int, vocab_size: int, decode: Callable[[Sequence[int]], str],
                 leaders: int = 1) -> None:
        self._rollout, self._fleet, self._session = config.rollout, fleet, session
        self._rid_prefix, self._serial = rid_prefix, 0
        self._balancer = Balancer(leader_index, leaders)
        self._vocab_size, self._decode = vocab_size, decode
        self._seeded = config.rollout.engine == "embedded"  # SGLang takes no seed per sample
        # with in_place SGLang keeps prefixes of all weights there have been (the embedded engine: of those in slots)
        self._keeps_old = config.rollout.engine == "sglang" and config.rollout.on_update == "in_place"
        self._aborts: set[asyncio.Task[None]] = set()

    async def group(self, prompt: Prompt, seeds: Sequence[int], work: Work) -> Group | None:
        """All samples of `prompt`, or None if every attempt failed (counted under `dropped`).

        Raises:
            UserMistake, MachineFault: as `complete` does.
        """
        completions = await self.complete(prompt.token_ids, seeds, work, f"p{prompt.position}")
        self._balancer.forget(f"p{prompt.position}")
        if completions is None:
            work.counts["dropped"] += 1
            return None
        return self._build(prompt, seeds, completions, work.counts)

    async def complete(self, input_ids: np.ndarray, seeds: Sequence[int], work: Work, name: str
                       ) -> list[Completion] | None:
        """`work.sampling.n` completions of `input_ids`, or None if every attempt failed.

        Args:
            input_ids: int32 [tokens].
            seeds: one per completion.
            work: sampling parameters and what may answer.
            name: of the request, in its id and in messages. What stands before the first slash (a conversation, a
                group) stays with one engine while that lives.

        Raises:
            UserMistake: an engine refuses the request itself (too long for its context, say).
            MachineFault: no engine with current weights for `rollout.no_engine_timeout_s`.
        """
        for _ in range(self._rollout.retries + 1):
            begun = await self._attempts(input_ids, seeds, work, name)
            if begun is None or any(len(completion.response_ids) or not _aborted(completion) for completion in begun):
                break  # else all waited in the engine's queue: the group is still whole
        if begun is None or not any(_aborted(completion) for completion in begun):
            return begun
        whole = await asyncio.gather(*[self._resumed(input_ids, seed, completion, work, f"{name}/{number}")
                                       for number, (seed, completion) in enumerate(zip(seeds, begun, strict=True))])
        return None if any(completion is None for completion in whole) else whole

    async def _resumed(self, input_ids: np.ndarray, seed: int, begun: Completion, work: Work, name: str
                       ) -> Completion | None:
        """The completion that goes on from `begun`, over as many aborts as come; itself if it is whole.

        None if it cannot be had, or is aborted again and again before its next token.
        """
        idle = 0
        while _aborted(begun):
            left = work.sampling.max_new_tokens - len(begun.response_ids)
            if not left:
                return replace(begun, finish="length")
            work.counts["resumed"] += 1
            more = await self._attempts(np.concatenate((input_ids, begun.response_ids)), [seed], replace(
                work, sampling=replace(work.sampling, n=1, max_new_tokens=left)), name)
            idle = 0 if more and len(more[0].response_ids) else idle + 1
            if more is None or idle > self._rollout.retries:
                return None
            begun = begun.then(more[0])
        return begun

    async def _attempts(self, input_ids: np.ndarray, seeds: Sequence[int], work: Work, name: str
                        ) -> list[Completion] | None:
        avoid: set[tuple[str, int]] = set()
        for attempt in range(self._rollout.retries + 1):
            if attempt:
                work.counts["retries"] += 1
                await asyncio.sleep(backoff_s(attempt - 1))
            engine = await self._engine(avoid, name.partition("/")[0], work.sampling.n, fresh=attempt > 0,
                                        waits=work.expected is not None and work.expected.or_newer)
            begun = time.monotonic()
            try:
                completions = await self._ask(engine, input_ids, seeds, work, name)
            except EngineRefused as error:
                raise UserMistake(f"an engine refuses the request {name}: {error}", "rollout",
                                  "prompt and response must fit the model's context") from error
            except CURABLE as error:
                work.counts[f"failed/{error.reason}"] += 1
                log.warning("request %s, attempt %d of %d: %s", name, attempt + 1, self._rollout.retries + 1, error)
                avoid.add(engine.key)
                if isinstance(error, EngineTimeout):
                    self._fleet.timed_out(engine, str(error))
                continue
            finally:
                self._balancer.give_back(engine, work.sampling.n)
            work.counts["request_seconds"] += time.monotonic() - begun
            work.counts[f"engine/{engine.id}"] += 1
            self._fleet.answered(engine)
            return completions
        return None

    async def close(self) -> None:
        """End what is under way: requests are cancelled, and their engines told so."""
        under_way = asyncio.all_tasks() - {asyncio.current_task()} - self._aborts
        for task in under_way:
            task.cancel()
        for tasks in (under_way, self._aborts):
            if tasks:
                await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)

    async def _engine(self, avoid: set[tuple[str, int]], affinity: str, sequences: int, *, fresh: bool,
                      waits: bool) -> EngineRecord:
        """An engine with current weights, waiting for one if need be; MachineFault after no_engine_timeout_s.

        With `waits`, time in which an engine is up and lacks only weights does not count: the trainers are busy, and
        will give it theirs.
        """
        deadline = time.monotonic() + self._rollout.no_engine_timeout_s
        while True:
            engines = self._fleet.synced_engines(max_age_s=0.0 if fresh else REGISTRY_AGE_S)
            if engines:
                return self._balancer.take(engines, avoid, affinity, sequences)
            self._fleet.raise_failures()
            if waits and self._fleet.engines(max_age_s=REGISTRY_AGE_S):  # one is up: it waits for the trainers
                deadline = time.monotonic() + self._rollout.no_engine_timeout_s
            if time.monotonic() > deadline:
                raise MachineFault(f"no engine holds this run's weights since {self._rollout.no_engine_timeout_s:.0f} "
                                   f"s: {self._fleet.describe_missing(engines)}")
            await asyncio.sleep(REGISTRY_AGE_S)

    async def _ask(self, engine: EngineRecord, input_ids: np.ndarray, seeds: Sequence[int], work: Work, name: str
                   ) -> list[Completion]:
        """One attempt; a request that may still be running when it ends is aborted in the background."""
        self._serial += 1
        request = GenerateRequest(f"{self._rid_prefix}/{self._serial}/{name}/", input_ids, work.sampling,
                                  tuple(seeds) if self._seeded else None, work.routing,
                                  work.expected.version if self._keeps_old and work.expected is not None else None)
        client = EngineClient(engine.url, self._session, request_timeout_s=self._rollout.request_timeout_s,
                              keys=engine.keys)
        try:
            completions = await self._while_there(engine, client.generate(
                request, vocab_size=self._vocab_size, expected=work.expected))
        except (asyncio.CancelledError, EngineTimeout):
            task = asyncio.create_task(self._abort(client, request.rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        if not work.resumes and any(_aborted(completion) for completion in completions):
            raise Aborted(f"{engine.url} aborted {request.rid}")
        return completions

    async def _while_there(self, engine: EngineRecord, answer: Coroutine[Any, Any, list[Completion]]
                           ) -> list[Completion]:
        """The answer, unless the registry says that the engine's process is gone: a host without power closes nothing.

        Raises:
            EngineLost: it is gone; and what the answer raises.
        """
        asking = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({asking}, timeout=WATCH_S))[0]:
                if all(record.key != engine.key for record in self._fleet.engines(max_age_s=WATCH_S)):
                    raise EngineLost(f"{engine.url}: the engine is gone")
            return asking.result()
        finally:
            asking.cancel()

    async def _abort(self, client: EngineClient, rid: str) -> None:
        try:
            await client.abort(rid, timeout_s=ABORT_TIMEOUT_S)
        except EngineError as error:
            log.warning("could not abort %s: %s", rid, error)  # its engine is lost or hangs: the supervisor's affair

    def _build(self, prompt: Prompt, seeds: Sequence[int], completions: list[Completion],
               counts: Counter[str]) -> Group:
        samples = [Sample(prompt, n, seed, done.response_ids, done.logprobs, done.finish,
                          self._decode(done.response_ids.tolist()), done.versions, experts=done.experts)
                   for n, (seed, done) in enumerate(zip(seeds, completions, strict=True))]
        counts["groups"] += 1
        counts["samples"] += len(samples)
        counts["prompt_tokens"] += len(prompt.token_ids) * len(samples)
        counts["cached_tokens"] += sum(done.cached_tokens for done in completions)
        counts["response_tokens"] += int(np.sum([len(done.response_ids) for done in completions]))
        return Group(prompt, samples)


def _aborted(completion: Completion) -> bool:
    return completion.finish == "abort"
