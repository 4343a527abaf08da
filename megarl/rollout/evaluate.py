"""Evaluation: held-out prompts, each set with its own sampling, dealt over the leaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megarl.cluster.groups import Groups, sum_named
from megarl.config.schema import EvalSetConfig
from megarl.data.sample import Group, Prompt
from megarl.rollout.generate import Generator

Sets = Sequence[tuple[str, EvalSetConfig, list[Prompt]]]


def answer(sets: Sets, generator: Generator, seed: int, version: str,
           record: Callable[[str, list[Group]], None]) -> list[dict[str, float]]:
    """Have this leader's share of every set answered and scored; the `sums` of each set.

    Args:
        sets: name, config, prompts.
        generator: this leader's.
        seed: of the sampling; the same seed samples the same answers from the same weights.
        version: of the weights that are published.
        record: called with each set's name and this leader's groups.
    """
    mine = []
    for name, chosen, prompts in sets:
        collected = generator.generate_eval(prompts, chosen.sampling, seed, version=version)
        record(name, collected.groups)
        mine.append(sums(collected.groups, chosen))
    return mine


def metrics(sets: Sets, mine: list[dict[str, float]], groups: Groups) -> dict[str, float]:
    """Metrics of every set, `eval/<set>/...` as `averages` names them, of what `answer` returned to each leader.

    Collective over the leaders; the result is the same on all of them.
    """
    found: dict[str, float] = {}
    for (name, chosen, prompts), part in zip(sets, mine, strict=True):
        total = sum_named(part, groups.leaders)
        found |= {f"eval/{name}/{key}": value for key, value in averages(total, chosen, len(prompts)).items()}
    return found


def sums(groups: list[Group], chosen: EvalSetConfig) -> dict[str, float]:
    """What `averages` needs of answered prompts, to be added up over leaders."""
    found = dict.fromkeys(("prompts", "reward", "samples", "tokens", "truncated", "unscored"), 0.0)
    found |= {f"pass@{k}": 0.0 for k in chosen.pass_at} | {f"of pass@{k}": 0.0 for k in chosen.pass_at}
    for group in groups:
        whole = [s for s in group.samples if s.part == 0]  # the parts of an episode share its reward
        rewards = [s.reward for s in whole if s.reward is not None]
        found["samples"] += len(whole)
        found["unscored"] += len(whole) - len(rewards)
        found["tokens"] += sum(s.sampled_tokens for s in group.samples)
        found["truncated"] += sum(s.finish == "length" for s in whole)
        if rewards:
            found["prompts"] += 1
            found["reward"] += math.fsum(rewards) / len(rewards)
        for k in chosen.pass_at:
            if len(rewards) >= k:
                found[f"of pass@{k}"] += 1
                found[f"pass@{k}"] += pass_at_k(len(rewards), sum(r >= chosen.success for r in rewards), k)
    return found


def averages(total: dict[str, float], chosen: EvalSetConfig, prompts: int) -> dict[str, float]:
    """Metrics of a set.

    Args:
        total: `sums` over all leaders.
        chosen: the set.
        prompts: of the set.

    Returns:
        reward: mean over prompts of the mean over a prompt's samples (avg@k); pass@k: mean over the prompts that have k
        rewards; NaN where there are none. response_tokens and truncated per sample; unscored: samples without a reward;
        unanswered: prompts that no engine answered.
    """
    samples = max(total["samples"], 1)
    return {"reward": _ratio(total["reward"], total["prompts"]), "response_tokens": total["tokens"] / samples,
            "truncated": total["truncated"] / samples, "unscored": total["unscored"],
            "unanswered": prompts - total["samples"] / chosen.sampling.samples,
            **{f"pass@{k}": _ratio(total[f"pass@{k}"], total[f"of pass@{k}"]) for k in chosen.pass_at}}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` of these samples, drawn without replacement, is correct.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 ("Evaluating Large Language Models Trained on
    Code", eq. 1), in exact integers.

    Args:
        samples: n, the number of samples of the prompt.
        correct: c, how many of them are correct.
        k: at most n.

    Raises:
        ValueError: not 0 <= correct <= samples, or not 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan
