"""Filling an experience: the leaders draw prompts from one counter and have the fleet answer them.

Which prompts a step takes depends on positions only, and each sample's seed on (run seed, position, n), so the groups
of a step are the same whichever leader or engine made them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.distributed import Store

from megarl.config.schema import Config, SamplingConfig
from megarl.data.sample import Group, Prompt, Sample, sample_seed
from megarl.errors import MachineFault
from megarl.rollout.client import open_session
from megarl.rollout.counters import SharedCounters
from megarl.rollout.fleet import Fleet
from megarl.rollout.issue import Issuer, Work
from megarl.rollout.protocol import Expected, Sampling


class Prompts(Protocol):
    """Random access to the prompts of a run."""

    def at(self, position: int) -> Prompt:
        """The prompt of the `position`-th draw of the run."""
        ...


@dataclass
class Collected:
    """What one leader has after a collection.

    Attributes:
        groups: this leader's, scored, by position.
        filtered: this leader's groups that `keep` turned away (dynamic sampling), by position.
        reports: what `score` returned, one per group, in no order.
        next_position: where the next step begins; the same on all leaders, like the next three.
        kept, drawn, dropped: groups of all leaders: kept for training, drawn, given up after all retries.
        rounds: rounds of drawing (1 without dynamic sampling).
        seconds: from begin to end on this leader.
        counts: this leader's additive counters: groups, samples, prompt_tokens, cached_tokens, response_tokens,
            truncated, dropped, retries, request_seconds, failed/<reason>, engine/<id> (groups it answered).
    """

    groups: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    next_position: int = 0
    kept: int = 0
    drawn: int = 0
    dropped: int = 0
    rounds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


class Generator:
    """One leader's generation; its requests run in an event loop of its own thread. Close it when done.

    Args:
        config: the run's.
        prompts: the training prompts.
        fleet: the registry; not to be used by others while a call here is under way.
        store: the control store of this life of the job.
        generation: name of this life of the job.
        leader_index, leaders: which leader this is, of how many.
        vocab_size: of the model; an answer with other token ids is refused.
        decode: token ids -> text without special tokens.
        score: fills in the rewards of a group's samples (`RewardPool.score_group`); begun as soon as the group is back,
            while others are generated. None leaves them unscored.
        keep: with dynamic sampling, whether a scored group is trained on (called in the generator's thread).
    """

    def __init__(self, config: Config, prompts: Prompts, fleet: Fleet, store: Store, *, generation: str,
                 leader_index: int, leaders: int, vocab_size: int, decode: Callable[[Sequence[int]], str],
                 score: Callable[[list[Sample]], Awaitable[Any]] | None = None,
                 keep: Callable[[Group], bool] | None = None) -> None:
        self._config, self._prompts = config, prompts
        self._leader_index, self._leaders = leader_index, leaders
        self._score, self._keep = score, keep
        self._counters = SharedCounters(store, leader_index, leaders)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generator", daemon=True)
        self._thread.start()
        self._session, self._issuer = self._run(self._open(fleet, generation, vocab_size, decode))

    async def _open(self, fleet: Fleet, generation: str, vocab_size: int, decode: Callable[[Sequence[int]], str]):
        session = open_session()
        return session, Issuer(self._config, fleet, session, rid_prefix=f"{generation}/{self._leader_index}",
                               leader_index=self._leader_index, vocab_size=vocab_size, decode=decode)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait (Ctrl-C) must not leave the work going on
            raise

    def collect(self, step: int, start_position: int, need: int, *, version: str) -> Collected:
        """This leader's part of the groups at positions start_position .. + need - 1, and of refills.

        All leaders call it with the same arguments; together they get every position exactly once. With dynamic
        sampling, groups that `keep` turns away or that were dropped are replaced by as many at the next positions, in
        at most `objective.refill_rounds` further rounds; otherwise a dropped group is missing.

        Args:
            step: names the shared counters; a step is collected once in a life of the job.
            start_position: the data position, `next_position` of the step before.
            need: groups wanted, over all leaders.
            version: the newest weights published; see `protocol.Expected` for what `rollout.max_lag` allows.
        Raises:
            UserMistake: an engine refuses a request as wrong.
            MachineFault: no engine with current weights, another leader lost, or every group of the step dropped.
        """
        return self._run(self._collect(step, start_position, need, version))

    async def _collect(self, step: int, start_position: int, need: int, version: str) -> Collected:
        begun, result = time.monotonic(), Collected(next_position=start_position)
        rollout, refill = self._config.rollout, self._keep is not None
        sampling = Sampling(rollout.max_response_tokens, rollout.temperature, n=rollout.samples_per_prompt,
                            stop=tuple(rollout.stop), stop_token_ids=tuple(rollout.stop_token_ids))
        work = Work(sampling, Expected(version, rollout.max_lag), result.counts)
        for turn in range(1 + (self._config.objective.refill_rounds if refill else 0)):
            missing = need - result.kept
            await self._round(step, turn, result.next_position, missing, work, result)
            kept, dropped = await self._counters.totals(step, turn, missing, self._silence_s())
            result.kept, result.dropped = result.kept + kept, result.dropped + dropped
            result.drawn, result.next_position = result.drawn + missing, result.next_position + missing
            result.rounds = turn + 1
            if result.kept == need:
                break
        self._counters.leave(step, result.rounds)
        if result.dropped == result.drawn:
            raise MachineFault(f"step {step}: all {result.drawn} groups were dropped after {rollout.retries} retries "
                               f"each; this leader saw {_failures(result.counts)}")
        return _finish(result, begun)

    async def _round(self, step: int, turn: int, start: int, need: int, work: Work, result: Collected) -> None:
        """Draw and generate until the round's numbers are gone; groups are scored while others are generated."""
        async def resolve(group: Group | None) -> None:
            if group is not None:
                await self._score_group(group, result)
            kept = group is not None and (self._keep is None or self._keep(group))
            if group is not None:
                (result.groups if kept else result.filtered).append(group)
            self._counters.resolve(step, turn, kept=kept, dropped=group is None)

        async def work_off(scoring: asyncio.TaskGroup) -> None:
            while (number := self._counters.draw(step, turn, need)) is not None:
                prompt = self._prompts.at(start + number)
                seeds = [sample_seed(self._config.run.seed, prompt.position, n) for n in range(work.sampling.n)]
                scoring.create_task(resolve(await self._issuer.group(prompt, seeds, work)))

        share = -(-need // self._leaders)  # more at once would only take prompts away from other leaders
        await _together(work_off, min(share, self._config.rollout.groups_in_flight))

    def generate_eval(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int, *,
                      version: str) -> Collected:
        """Answers to this leader's share of evaluation prompts: those at indices leader_index, + leaders, ...

        Sample n of prompt i has seed sample_seed(seed, i, n). Groups come scored, in order of the prompts; `kept`,
        `drawn` and `dropped` count this leader's alone. top-p, top-k and min-p are allowed here.

        Raises:
            UserMistake, MachineFault: as in `collect`.
        """
        return self._run(self._evaluate(prompts, sampling, seed, version))

    async def _evaluate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int,
                        version: str) -> Collected:
        begun, result, rollout = time.monotonic(), Collected(rounds=1), self._config.rollout
        params = Sampling(sampling.max_response_tokens or rollout.max_response_tokens, sampling.temperature,
                          sampling.top_p, sampling.top_k, sampling.min_p, sampling.samples, tuple(rollout.stop),
                          tuple(rollout.stop_token_ids))
        work = Work(params, Expected(version, rollout.max_lag), result.counts)
        mine = iter(range(self._leader_index, len(prompts), self._leaders))
        answered: dict[int, Group] = {}

        async def work_off(scoring: asyncio.TaskGroup) -> None:
            for index in mine:
                seeds = [sample_seed(seed, index, n) for n in range(params.n)]
                group = await self._issuer.group(prompts[index], seeds, work)
                if group is not None:
                    answered[index] = group
                    scoring.create_task(self._score_group(group, result))

        await _together(work_off, rollout.groups_in_flight)
        result.groups = [answered[index] for index in sorted(answered)]
        result.kept, result.dropped = len(answered), result.counts["dropped"]
        result.drawn = result.kept + result.dropped
        result.seconds = time.monotonic() - begun
        return result

    async def _score_group(self, group: Group, result: Collected) -> None:
        if self._score is not None:
            result.reports.append(await self._score(group.samples))

    def _silence_s(self) -> float:
        """The longest that one group can keep another leader busy, with room for its scoring."""
        rollout = self._config.rollout
        return (rollout.retries + 1) * (rollout.request_timeout_s + rollout.no_engine_timeout_s) \
            + self._config.cluster.timeout_s

    def close(self) -> None:
        """Abort what is under way, close connections, end the thread."""
        async def end() -> None:
            await self._issuer.close()
            await self._session.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _together(work_off: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]], at_once: int) -> None:
    """Run `work_off` `at_once` times at a time, and the tasks it makes; the first failure cancels all and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work_off(tasks))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _finish(result: Collected, begun: float) -> Collected:
    result.groups.sort(key=lambda group: group.prompt.position)
    result.filtered.sort(key=lambda group: group.prompt.position)
    result.seconds = time.monotonic() - begun
    return result


def _failures(counts: Counter[str]) -> str:
    seen = {name.removeprefix("failed/"): count for name, count in counts.items() if name.startswith("failed/")}
    return ", ".join(f"{count} {name}" for name, count in sorted(seen.items())) or "none of them fail"
