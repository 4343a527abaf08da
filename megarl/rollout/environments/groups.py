"""The groups of prompts that have an environment: n episodes each, played at once, retried, scored, counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.config.schema import Config
from megarl.data.sample import Group, Prompt, Sample
from megarl.objective.recipes import Objective
from megarl.objective.turns import turn_advantages
from megarl.reward.pool import EXAMPLES, ScoreReport
from megarl.rollout.environments.chat import Chat, Refused
from megarl.rollout.environments.endpoint import Endpoint
from megarl.rollout.environments.episode import Ask, Complete, Episode, Limits
from megarl.rollout.environments.load import Bound, bind_all
from megarl.rollout.environments.play import Client, Failed, play
from megarl.rollout.environments.protocol import Task
from megarl.rollout.issue import Work
from megarl.rollout.protocol import Completion

IssuerComplete = Callable[[np.ndarray, Sequence[int], Work, str], Awaitable[list[Completion] | None]]
Score = Callable[[Sequence[Sample]], Awaitable[ScoreReport]]


@dataclass
class _Played:
    """One episode of a group, at its end.

    Attributes:
        episode: of the last attempt.
        samples: one per piece; none if the model was never asked.
        answer: text for reward terms.
        failed: why it has no reward.
        attempts: of how many it was the last.
    """

    episode: Episode
    samples: list[Sample]
    answer: str
    failed: Failed | None
    attempts: int


class Environments:
    """All environments of a run, for one leader. Lives in the event loop that asks the engines.

    Args:
        config: the run's.
        tokenizer: of the model, with a chat template if there is any environment.
        objective: for the credit of turns.
        stop_ids: tokens that end a reply.
        score: reward terms (`RewardPool.score_group`); None if there are none.
    Raises:
        UserMistake: as `load.bind_all`; the tokenizer has no chat template.
    """

    def __init__(self, config: Config, tokenizer: Any, objective: Objective, *, stop_ids: Sequence[int],
                 score: Score | None) -> None:
        self._config, self._objective, self._tokenizer, self._score = config, objective, tokenizer, score
        self._bound: Mapping[str, Bound] = bind_all(config)
        stops = {*stop_ids, *config.rollout.stop_token_ids}
        self._chats = {bound.config.name: Chat(tokenizer, options=config.data.chat_template_options, stop_ids=stops,
                                               form=bound.config.tool_format) for bound in self._bound.values()}
        self._places = {name: asyncio.Semaphore(bound.config.concurrency) for bound in self._bound.values()
                        for name in [bound.config.name]}
        self._endpoint = Endpoint()

    @property
    def sources(self) -> frozenset[str]:
        """Names of the data sources and evaluation sets whose prompts have an environment."""
        return frozenset(self._bound)

    async def make(self, complete: IssuerComplete, prompt: Prompt, seeds: Sequence[int], work: Work
                   ) -> tuple[Group | None, ScoreReport]:
        """The scored group of a prompt, and what happened to its episodes.

        An episode may give several samples, which share its reward. One that failed gives samples without a reward, or
        with `reward.error_value` (see `reward.on_error`), or none if the model was never asked. The group is None if no
        engine answered any of its episodes; with error_value, if none answered one of them, which earned no value.

        Raises:
            UserMistake, MachineFault: as `complete` does.
        """
        bound = self._bound[prompt.source]
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(self._episode(bound, complete, prompt, n, seed, work))
                           for n, seed in enumerate(seeds)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        played = [task.result() for task in playing]
        report = await self._reward(bound, played)
        self._count(bound, played, work.counts)
        if bound.config.credit == "turn":
            self._credit(bound, played)
        unanswered = [one.failed is not None and one.failed.kind == "engines" for one in played]
        if all(unanswered) or self._config.reward.on_error == "value" and any(unanswered):
            return None, report
        return Group(prompt, [sample for one in played for sample in one.samples]), report

    async def close(self) -> None:
        """End the endpoint."""
        await self._endpoint.close()

    async def _episode(self, bound: Bound, complete: IssuerComplete, prompt: Prompt, n: int, seed: int, work: Work
                       ) -> _Played:
        """An episode, played again if the environment's code raises or takes too long.

        The attempts have the same seed: one with another would prefer conversations in which the code does not fail.
        """
        config, chat = bound.config, self._chats[bound.config.name]
        task = Task(prompt.text, prompt.label, prompt.source, prompt.extra, prompt.position, n, seed)
        failed, answer = None, ""
        async with self._places[config.name]:
            for attempt in range(config.retries + 1):
                episode = Episode(chat, _completing(complete, work), self._limits(config.max_turn_tokens,
                                  config.max_turns, work), seed, f"p{prompt.position}/{n}.{attempt}")
                try:
                    async with self._endpoint.open(episode) as (url, key):
                        answer = await play(bound, episode, task, Client(url, key, self._config.model.path, episode))
                    failed = None
                    break
                except Failed as error:
                    failed = error
                    if error.kind not in ("error", "timeout"):
                        break
        return _Played(episode, episode.samples(prompt, n, self._text), answer, failed, attempt + 1)

    def _text(self, ids: list[int]) -> str:
        """For records: special tokens are shown, since they say who speaks."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _limits(self, turn: int | None, turns: int, work: Work) -> Limits:
        """An episode has the room of a single-turn sample: what is checked for those, and planned, holds for it."""
        response = work.sampling.max_new_tokens
        return Limits(self._config.data.max_prompt_tokens + response, response, turn or response, turns)

    async def _reward(self, bound: Bound, played: list[_Played]) -> ScoreReport:
        """Set the rewards; tell what failed."""
        name, config = f"environment {bound.config.name}", self._config.reward
        report = ScoreReport(samples=len(played))
        for one in played:
            if one.failed is None:
                value = one.episode.reward
                for sample in one.samples:
                    sample.reward = value
                continue
            valued = config.on_error == "value" and one.failed.kind != "engines"
            report.failed += 1
            report.dropped += not valued
            report.failures[name, one.failed.kind] += 1
            if len(report.examples) < EXAMPLES:
                report.examples.append(f"{name} {one.failed.kind} in episode {one.episode.name}: {one.failed}")
            for sample in one.samples:
                sample.reward = config.error_value if valued else None
        if bound.config.reward_terms:
            report = await self._terms(played, report)
        return report

    async def _terms(self, played: list[_Played], report: ScoreReport) -> ScoreReport:
        """Add what reward terms give for each episode's last reply, scored once for all its samples."""
        good = [one for one in played if one.failed is None]
        asked = [replace(one.samples[-1], text=one.answer, reward=None, reward_terms={}) for one in good]
        scored = await self._score(asked)
        for one, answer in zip(good, asked, strict=True):
            if answer.reward is None:
                one.failed = Failed("terms", "a reward term failed")
            else:
                one.episode.turns[-1].reward += answer.reward
            for sample in one.samples:
                sample.reward = None if answer.reward is None else one.episode.reward
                sample.reward_terms = answer.reward_terms
        report.add(replace(scored, samples=0))
        return report

    def _credit(self, bound: Bound, played: list[_Played]) -> None:
        """Advantages of turns, from the turns of all episodes of the group that have a reward."""
        good = [one for one in played if one.failed is None]
        values = turn_advantages([[turn.reward for turn in one.episode.turns] for one in good],
                                 bound.config.discount, self._objective)
        for one, advantages in zip(good, values, strict=True):
            for sample in one.samples:
                sample.advantages = np.zeros(len(sample.response_ids), np.float32)
            for turn, advantage in zip(one.episode.turns, advantages, strict=True):
                one.samples[turn.piece].advantages[turn.start:turn.end] = advantage

    def _count(self, bound: Bound, played: list[_Played], counts: Counter[str]) -> None:
        """The leader's counters: those of single-turn groups, an episode counted as one sample, and our own."""
        counts["groups"] += 1
        counts["samples"] += sum(bool(one.samples) for one in played)
        prefix = f"environment/{bound.config.name}"
        for one in played:
            episode, sampled = one.episode, sum(turn.end - turn.start for turn in one.episode.turns)
            counts["prompt_tokens"] += episode.prompt_tokens
            counts["cached_tokens"] += episode.cached_tokens
            counts["response_tokens"] += sampled
            counts[f"{prefix}/episodes"] += 1
            counts[f"{prefix}/attempts"] += one.attempts
            counts[f"{prefix}/turns"] += len(episode.turns)
            counts[f"{prefix}/samples"] += len(one.samples)
            counts[f"{prefix}/tool_calls"] += episode.tool_calls
            counts[f"{prefix}/tool_errors"] += episode.tool_errors
            counts[f"{prefix}/cut"] += episode.cut
            counts[f"{prefix}/failed"] += one.failed is not None
            counts[f"{prefix}/reward"] += one.samples[0].reward if one.samples and one.failed is None else 0.0


def _completing(complete: IssuerComplete, work: Work) -> Complete:
    """One completion at a time from an issuer, with the run's own sampling parameters."""
    async def ask(call: Ask) -> Completion | None:
        if work.resumes and call.stop:  # it may lie across the place where an aborted answer is continued
            raise Refused("stop is not supported with rollout.on_update: abort")
        sampling = replace(work.sampling, n=1, max_new_tokens=call.max_tokens, stop=(*work.sampling.stop, *call.stop))
        completions = await complete(call.ids, [call.seed], replace(work, sampling=sampling), call.name)
        return completions[0] if completions else None

    return ask


METRICS = ("episodes", "attempts", "turns", "samples", "tool_calls", "tool_errors", "cut", "failed", "reward")


def count_names(config: Config) -> list[str]:
    """Names of the counters of all environments, the same on every leader."""
    return [f"environment/{entry.name}/{name}" for entry in config.environments for name in METRICS]


def metrics(total: Mapping[str, float]) -> dict[str, float]:
    """From counters summed over the leaders to metrics: means over episodes; failures and attempts beyond the first as
    counts. An environment without an episode has none."""
    found: dict[str, float] = {}
    for key, episodes in total.items():
        prefix, _, name = key.rpartition("/")
        if name != "episodes" or not prefix.startswith("environment/") or not episodes:
            continue
        good = max(episodes - total[f"{prefix}/failed"], 1)
        found |= {f"{prefix}/reward": total[f"{prefix}/reward"] / good, f"{prefix}/failed": total[f"{prefix}/failed"],
                  f"{prefix}/retries": total[f"{prefix}/attempts"] - episodes}
        found |= {f"{prefix}/{kind}": total[f"{prefix}/{kind}"] / episodes
                  for kind in ("turns", "samples", "tool_calls", "tool_errors", "cut")}
    return found
