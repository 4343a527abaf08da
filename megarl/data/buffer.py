"""The experience buffer: what the loop takes a step's samples from.

Sampling goes on beside the training, as far ahead as rollout.max_lag allows. Synchronous training is a lag of 0: a take
then returns when the last group that the weights just published were asked for is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups, sum_named
from megarl.data.exchange import gather_table
from megarl.data.ragged import SampleBatch
from megarl.data.sample import Group
from megarl.data.table import SampleTable
from megarl.errors import MachineFault, UserMistake
from megarl.objective.advantages import has_signal

_COUNTS = ("prompt_tokens", "samples", "retries", "resumed")
_FAILED = tuple(f"failed/{reason}" for reason in (  # of requests, `EngineError.reason`
    "lost", "timeout", "failed", "busy", "bad_answer", "wrong_version", "aborted", "error"))


class Report(Protocol):
    """What scoring says of a group (see `reward.pool.ScoreReport`)."""

    failed: int

    def add(self, other: Report) -> None:
        """Take in the report on other samples."""

    def describe(self) -> str:
        """What failed, in a few lines; "" if nothing did."""


class Collected(Protocol):
    """What a leader gives for a step (see `rollout.generate.Collected`)."""

    groups: list[Group]
    filtered: list[Group]
    reports: list[Report]
    counts: dict[str, float]


class Decision(Protocol):
    """Which groups a step takes (see `rollout.dispatch.Decision`)."""

    stops: bool
    saves: bool
    numbers: Sequence[int]
    unfinished: Sequence[int]
    position: int
    dropped: int
    ahead: int
    waited_s: dict[str, float]


@dataclass(frozen=True)
class Taken:
    """One step's samples.

    Attributes:
        local: this leader's scored samples; None on other ranks.
        groups: the same as groups, for records; [] on other ranks.
        table: all samples of the step, on every trainer.
        position, unfinished: where the data goes on, and the positions before that are not trained on yet.
        metrics: on leaders, of all leaders; {} on other ranks.
        problems: of this leader's rewards, for the log; "" if there were none.
        saves: a checkpoint is due after this step, by the clock.
    """

    local: SampleBatch | None
    groups: list[Group]
    table: SampleTable
    position: int
    unfinished: tuple[int, ...]
    metrics: dict[str, float]
    problems: str = ""
    saves: bool = False


class ExperienceBuffer:
    """Hands out experiences, one per step. Collective over the trainers.

    Args:
        take: `numbers -> Collected`, this leader's part of those groups; None on other ranks.
        decide: `step -> Decision`, the same on all trainers; waits for the groups, however long they take.
        groups: this trainer's groups.
        terms: names of the reward terms, as in `Sample.reward_terms`.
        max_lag: versions that a token may be behind.
        counters: names of further counters of `Collected.counts`, the same on all leaders.
        derive: from their sums over the leaders to metrics.
    """

    def __init__(self, take: Callable[[Sequence[int]], Collected] | None, decide: Callable[[int], Decision],
                 groups: Groups, terms: Sequence[str], max_lag: int, counters: Sequence[str] = (),
                 derive: Callable[[Mapping[str, float]], dict[str, float]] = lambda total: {}) -> None:
        self._take, self._decide, self._groups, self._terms, self._max_lag = take, decide, groups, terms, max_lag
        self._counters, self._derive = counters, derive

    def take(self, step: int) -> Taken | None:
        """The samples of `step` (from 0, the number of the weights it trains); None if the run is to stop.

        Samples without a reward (it failed, and reward.on_error is drop) are left out.

        Raises:
            UserMistake: no sample of the step has a reward because rewards failed.
            MachineFault: no sample of the step is left for another reason, or one is older than max_lag allows.
        """
        decision = self._decide(step)
        if decision.stops:
            return None
        local, found, metrics, problems = None, [], {}, ""
        if self._take is not None:
            collected = self._take(decision.numbers)
            found = collected.groups
            local = SampleBatch.from_groups(found)
            local = local.select(np.flatnonzero(~np.isnan(local.rewards)))
            self._refuse_old(step, local)
            metrics = self._measure(collected) | {
                "rollout/ahead_groups": float(decision.ahead), "rollout/dropped_groups": float(decision.dropped),
                **{f"seconds/wait_for_{what}": decision.waited_s.get(what, 0.0) for what in ("samples", "deadline")}}
            problems = _problems(collected.reports)
        table = gather_table(local, self._groups)
        if not len(table):
            _refuse_empty(step + 1, problems, metrics.get("rollout/filtered_groups", 0.0), decision.dropped)
        return Taken(local, found, table, decision.position, tuple(decision.unfinished), metrics, problems,
                     decision.saves)

    def _refuse_old(self, step: int, local: SampleBatch) -> None:
        """The admission rule keeps samples young enough; a mistake in it must not train."""
        oldest = local.versions[local.versions >= 0].min(initial=step)
        if oldest < step - self._max_lag:
            raise MachineFault(f"a token of version {oldest} was to be trained in step {step + 1}, rollout.max_lag is "
                               f"{self._max_lag}")

    def _measure(self, collected: Collected) -> dict[str, float]:
        """Metrics of all samples of the step, filtered groups included; collective over the leaders."""
        groups = (*collected.groups, *collected.filtered)
        parts = [s for group in groups for s in group.samples]
        samples = [s for s in parts if s.part == 0]
        rewards = [s.reward for s in samples if s.reward is not None]
        sums = {name: float(collected.counts.get(name, 0)) for name in (*_COUNTS, *_FAILED, *self._counters)}
        sums["failed"] = float(sum(report.failed for report in collected.reports))
        sums |= {"scored": float(len(rewards)), "unscored": float(len(samples) - len(rewards)),
                 "reward": math.fsum(rewards), "sampled": float(sum(s.sampled_tokens for s in parts)),
                 "cut": float(sum(s.finish == "length" for s in samples)),
                 "squares": math.fsum(r * r for r in rewards), "filtered": float(len(collected.filtered)),
                 "groups": float(len(groups)), "signal": float(sum(map(has_signal, groups)))}
        for term in self._terms:
            values = [s.reward_terms[term] for s in samples if term in s.reward_terms]
            sums |= {f"term {term}": math.fsum(values), f"count {term}": float(len(values))}
        total = sum_named(sums, self._groups.leaders)
        scored, count = max(total["scored"], 1), max(total["scored"] + total["unscored"], 1)
        mean = total["reward"] / scored
        metrics = {
            "reward/mean": mean, "reward/std": math.sqrt(max(total["squares"] / scored - mean * mean, 0)),
            "rollout/signal": total["signal"] / max(total["groups"], 1),
            "reward/failed": total["failed"], "reward/unscored": total["unscored"],
            "rollout/response_tokens": total["sampled"] / count, "rollout/truncated": total["cut"] / count,
            "rollout/retries": total["retries"],
            "rollout/resumed": total["resumed"], "rollout/filtered_groups": total["filtered"]}
        metrics |= {f"rollout/{name}": total[name] for name in _FAILED if total[name]}
        if total["samples"]:  # else all of the step's were answered before the last take
            metrics["rollout/prompt_tokens"] = total["prompt_tokens"] / total["samples"]
        if len(self._terms) > 1:
            metrics |= {f"reward/{term}": total[f"term {term}"] / max(total[f"count {term}"], 1)
                        for term in self._terms}
        return metrics | self._derive({name: total[name] for name in self._counters})


def _problems(reports: list[Report]) -> str:
    """What failed in all of a leader's reports together."""
    if not reports:
        return ""
    total = reports[0]
    for other in reports[1:]:
        total.add(other)
    return total.describe()


def _refuse_empty(step: int, problems: str, filtered: float, dropped: int) -> None:
    """End a run that has nothing to train on, with the same words on every trainer. `step` is told: from 1.

    A step of which dynamic sampling kept nothing is no failure: it changes nothing, and the next prompts may teach.
    """
    told = [problems, filtered]
    dist.broadcast_object_list(told, src=0, device=device.current())
    if told[1]:
        return
    if told[0]:
        raise UserMistake(f"no sample of step {step} has a reward\n{told[0]}", "reward.terms",
                          "correct the reward function, or set reward.on_error: value and reward.error_value")
    raise MachineFault(f"no sample of step {step} can be trained on: {dropped} groups were dropped, no engine could "
                       "answer them")
