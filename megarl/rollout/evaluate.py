"""Evaluation: held-out prompts, each set with its own sampling, dealt over the leaders."""

from __future__ import annotations

import math
from collections.abc import Callable

from megarl.cluster.groups import Groups, sum_named
from megarl.config.schema import EvalSetConfig
from megarl.data.sample import Group, Prompt
from megarl.observe.passk import pass_at_k
from megarl.rollout.generate import Generator


def evaluate(sets: list[tuple[str, EvalSetConfig, list[Prompt]]], generator: Generator, groups: Groups,
             seed: int, version: str, record: Callable[[str, list[Group]], None]) -> dict[str, float]:
    """Metrics of every set: `eval/<set>/reward` (mean over prompts of the mean over samples, avg@k), `pass@k`,
    response length, truncated share, and prompts that no engine answered.

    Collective over the leaders; the result is the same on all of them.

    Args:
        sets: name, config, prompts.
        generator, groups: this leader's.
        seed: of the sampling; the same seed samples the same answers from the same weights.
        version: of the weights that are published.
        record: called with each set's name and this leader's groups.
    """
    metrics: dict[str, float] = {}
    for name, chosen, prompts in sets:
        collected = generator.generate_eval(prompts, chosen.sampling, seed, version=version)
        record(name, collected.groups)
        sums = dict.fromkeys(("prompts", "reward", "samples", "tokens", "truncated", "unscored"), 0.0)
        sums |= {f"pass@{k}": 0.0 for k in chosen.pass_at} | {f"of pass@{k}": 0.0 for k in chosen.pass_at}
        for group in collected.groups:
            rewards = [s.reward for s in group.samples if s.reward is not None]
            sums["samples"] += len(group.samples)
            sums["unscored"] += len(group.samples) - len(rewards)
            sums["tokens"] += sum(len(s.response_ids) for s in group.samples)
            sums["truncated"] += sum(s.finish == "length" for s in group.samples)
            if rewards:
                sums["prompts"] += 1
                sums["reward"] += math.fsum(rewards) / len(rewards)
            for k in chosen.pass_at:
                if len(rewards) >= k:
                    sums[f"of pass@{k}"] += 1
                    sums[f"pass@{k}"] += pass_at_k(len(rewards), sum(r >= chosen.success for r in rewards), k)
        total = sum_named(sums, groups.leaders)
        samples = max(total["samples"], 1)
        metrics |= {
            f"eval/{name}/reward": _ratio(total["reward"], total["prompts"]),
            f"eval/{name}/response_tokens": total["tokens"] / samples,
            f"eval/{name}/truncated": total["truncated"] / samples,
            f"eval/{name}/unscored": total["unscored"],
            f"eval/{name}/unanswered": len(prompts) - total["samples"] / chosen.sampling.samples,
            **{f"eval/{name}/pass@{k}": _ratio(total[f"pass@{k}"], total[f"of pass@{k}"]) for k in chosen.pass_at}}
    return metrics


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan
