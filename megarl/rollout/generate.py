"""Answering prompts without a pause: a leader draws numbers, has the fleet answer their prompts, scores the answers.

Which prompt belongs to a number depends on the data alone, and each sample's seed on (run seed, position, n), so the
groups of a number are the same whichever leader or engine made them (as long as the same weights do).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch.distributed import Store

from megarl.config.schema import Config, SamplingConfig
from megarl.data.routing import RoutingShape
from megarl.data.sample import Group, Prompt, Sample, sample_seed, version_number
from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.rollout.admission import window
from megarl.rollout.client import open_session
from megarl.rollout.dispatch import Draws
from megarl.rollout.fleet import Fleet
from megarl.rollout.issue import Issuer, Work
from megarl.rollout.ledger import Entry, Tickets
from megarl.rollout.protocol import Expected, Sampling

POLL_LEAST_S, POLL_MOST_S = 0.001, 0.02
THREAD_S = 0.5  # between two looks at whether the thread that is waited for lives


class Environments(Protocol):
    """What answers prompts in conversations of several turns (see `environments.groups.Environments`)."""

    sources: Container[str]

    async def make(self, complete: Callable[..., Awaitable[Any]], prompt: Prompt, seeds: Sequence[int], work: Work
                   ) -> tuple[Group | None, Any]:
        """The scored group and a report on its scoring; `complete` as `Issuer.complete`."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class Prompts(Protocol):
    """Random access to the prompts of a run."""

    def at(self, position: int) -> Prompt:
        """The prompt of the `position`-th draw of the run."""
        ...


@dataclass
class Collected:
    """What one leader gives for a step, or has of an evaluation.

    Attributes:
        groups: this leader's, scored, by position.
        filtered: this leader's groups that `keep` turned away (dynamic sampling) since the last take, by position.
        reports: what `score` returned since the last take, one per group, in no order.
        counts: this leader's additive counters since the last take: groups, samples, prompt_tokens, cached_tokens,
            response_tokens, dropped, retries, resumed, request_seconds, failed/<reason>, engine/<id> (groups
            it answered).
    """

    groups: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Generator:
    """One leader's generation; its requests run in an event loop of its own thread. Close it when done.

    Args:
        config: the run's.
        prompts: the training prompts.
        fleet: the registry; not to be used by others.
        store: the control store of this life of the job.
        draws: the prompts of the numbers.
        generation: name of this life of the job.
        leader_index, leaders: which leader this is, of how many.
        vocab_size: of the model; an answer with other token ids is refused.
        decode: token ids -> text without special tokens.
        score: fills in the rewards of a group's samples (`RewardPool.score_group`); begun as soon as the group is back,
            while others are generated. None leaves them unscored.
        keep: with dynamic sampling, whether a scored group is trained on (called in the generator's thread).
        environments: make the groups of their data sources, scored, in place of one request for each.
    """

    def __init__(self, config: Config, prompts: Prompts, fleet: Fleet, store: Store, draws: Draws, *,
                 generation: str, leader_index: int, leaders: int, vocab_size: int,
                 decode: Callable[[Sequence[int]], str],
                 score: Callable[[list[Sample]], Awaitable[Any]] | None = None,
                 keep: Callable[[Group], bool] | None = None,
                 environments: Environments | None = None) -> None:
        self._config, self._prompts, self._draws = config, prompts, draws
        self._leader_index, self._leaders = leader_index, leaders
        self._score, self._keep, self._environments = score, keep, environments
        self._tickets, self._drawn = Tickets(store), None
        self._turn = asyncio.Lock()
        self._kept: dict[int, Group] = {}
        self._since = Collected()  # the last take; its counts stay the same object
        self._loop = asyncio.new_event_loop()
        self._broke: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="generator", daemon=True)
        self._thread.start()
        self._session, self._issuer = self._run(self._open(fleet, generation, vocab_size, decode))
        self._stream = asyncio.run_coroutine_threadsafe(self._generate(), self._loop)

    async def _open(self, fleet: Fleet, generation: str, vocab_size: int, decode: Callable[[Sequence[int]], str]):
        session = open_session()
        return session, Issuer(self._config, fleet, session, rid_prefix=f"{generation}/{self._leader_index}",
                               leader_index=self._leader_index, leaders=self._leaders, vocab_size=vocab_size,
                               decode=decode)

    def _work(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:  # asyncio hands on SystemExit and KeyboardInterrupt of any task
            self._broke = error

    def _check_thread(self) -> None:
        if not self._thread.is_alive():
            raise UserMistake(f"{type(self._broke).__name__}: {self._broke} ended the sampling of all episodes",
                              "environments", "code of an environment, its own tasks included, must not exit"
                              ) from self._broke

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], THREAD_S).done:
                self._check_thread()
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait (Ctrl-C) must not leave the work going on
            raise

    def check(self) -> None:
        """Raise what ended the generation, if something did.

        Raises:
            UserMistake: an engine refuses a request as wrong; code of an environment ended the thread.
            MachineFault: no engine with current weights.
        """
        self._check_thread()
        if self._stream.done():
            self._stream.result()

    def take(self, numbers: Sequence[int]) -> Collected:
        """Those of the groups `numbers` that this leader made, and what happened here since the last take."""
        async def take() -> Collected:
            groups = [self._kept.pop(number) for number in numbers if number in self._kept]
            since = replace(self._since, groups=groups, counts=Counter(self._since.counts))
            self._since.counts.clear()
            self._since = Collected(counts=self._since.counts)
            return since

        return _sorted(self._run(take()))

    def held(self, numbers: Sequence[int]) -> dict[int, Group]:
        """Those of the finished groups `numbers` that this leader has, by their places there; they stay."""
        async def look() -> dict[int, Group]:
            return {place: self._kept[number] for place, number in enumerate(numbers) if number in self._kept}

        return self._run(look())

    def restore(self, groups: Mapping[int, Group]) -> None:
        """Finished groups of an earlier life, by their numbers; before the first step."""
        self._kept.update(groups)

    async def _generate(self) -> None:
        """Draw and answer without an end."""
        rollout, steps = self._config.rollout, self._config.run.steps
        need = self._config.data.prompts_per_step
        most = window(need, rollout.max_lag if rollout.ahead is None else rollout.ahead, 0, steps)
        share = -(-most // self._leaders)  # more at once would only take prompts away from other leaders
        await _together(self._work_off, min(share, rollout.groups_in_flight))

    async def _work_off(self, scoring: asyncio.TaskGroup) -> None:
        rollout = self._config.rollout
        sampling = Sampling(rollout.max_response_tokens, rollout.temperature, n=rollout.samples_per_prompt,
                            stop=tuple(rollout.stop), stop_token_ids=tuple(rollout.stop_token_ids))
        replays = self._config.moe.replay == "engine"
        routing = RoutingShape.of(HFConfig.read(self._config.model.path)) if replays else None
        while True:
            number = await self._next_number()
            version = self._tickets.version()
            self._tickets.write(Entry(number, "issued", version_number(version)))
            prompt = self._prompts.at(self._draws.at(number))
            seeds = [sample_seed(self._config.run.seed, prompt.position, n) for n in range(sampling.n)]
            work = Work(sampling, Expected(version, or_newer=rollout.max_lag > 0), self._since.counts,
                        resumes=rollout.on_update == "abort", routing=routing)
            scoring.create_task(self._resolve(number, await self._group(prompt, seeds, work, lambda: self._since)))

    async def _next_number(self) -> int:
        """The next number that may be issued; waits until there is one. Only one at a time is held here."""
        async with self._turn:
            if self._drawn is None:
                self._drawn = self._tickets.draw()
            pause = POLL_LEAST_S
            while self._drawn >= self._tickets.limit():
                await asyncio.sleep(pause)
                pause = min(2 * pause, POLL_MOST_S)
            number, self._drawn = self._drawn, None
            return number

    async def _resolve(self, number: int, group: Group | None) -> None:
        if group is not None:
            await self._score_group(group, lambda: self._since)
        kept = group is not None and (self._keep is None or self._keep(group))
        if kept:
            self._kept[number] = group
        elif group is not None:
            self._since.filtered.append(group)
        if not kept and self._keep is not None:
            step = version_number(self._tickets.version())
            self._tickets.replace(step, self._config.objective.refill_rounds * self._config.data.prompts_per_step)
        self._tickets.write(Entry(number, "kept" if kept else "dropped" if group is None else "filtered"))

    def generate_eval(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int, *,
                      version: str) -> Collected:
        """Answers to this leader's share of evaluation prompts: those at indices leader_index, + leaders, ...

        Sample n of prompt i has seed sample_seed(seed, i, n). Groups come scored, in order of the prompts.
        top-p, top-k and min-p are allowed here.

        Raises:
            UserMistake, MachineFault: as in `check`.
        """
        return self._run(self._evaluate(prompts, sampling, seed, version))

    async def _evaluate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int,
                        version: str) -> Collected:
        result, rollout = Collected(), self._config.rollout
        params = Sampling(sampling.max_response_tokens or rollout.max_response_tokens, sampling.temperature,
                          sampling.top_p, sampling.top_k, sampling.min_p, sampling.samples, tuple(rollout.stop),
                          tuple(rollout.stop_token_ids))
        work = Work(params, Expected(version), result.counts)
        mine = iter(range(self._leader_index, len(prompts), self._leaders))
        answered: dict[int, Group] = {}

        async def work_off(scoring: asyncio.TaskGroup) -> None:
            for index in mine:
                seeds = [sample_seed(seed, index, n) for n in range(params.n)]
                group = await self._group(prompts[index], seeds, work, lambda: result)
                if group is not None:
                    answered[index] = group
                    scoring.create_task(self._score_group(group, lambda: result))

        await _together(work_off, rollout.groups_in_flight)
        result.groups = [answered[index] for index in sorted(answered)]
        return result

    async def _group(self, prompt: Prompt, seeds: Sequence[int], work: Work, into: Callable[[], Collected]
                     ) -> Group | None:
        if not self._several_turns(prompt):
            return await self._issuer.group(prompt, seeds, work)
        group, report = await self._environments.make(self._issuer.complete, prompt, seeds, work)
        into().reports.append(report)
        return group

    def _several_turns(self, prompt: Prompt) -> bool:
        return self._environments is not None and prompt.source in self._environments.sources

    async def _score_group(self, group: Group, into: Callable[[], Collected]) -> None:
        if self._score is not None and not self._several_turns(group.prompt):
            report = await self._score(group.samples)
            into().reports.append(report)

    def close(self) -> None:
        """Abort what is under way, close connections, end the thread."""
        async def end() -> None:
            if self._environments is not None:
                await self._environments.close()
            await self._issuer.close()
            await self._session.close()

        if self._thread.is_alive():
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


def _sorted(result: Collected) -> Collected:
    result.groups.sort(key=lambda group: group.prompt.position)
    result.filtered.sort(key=lambda group: group.prompt.position)
    return result
