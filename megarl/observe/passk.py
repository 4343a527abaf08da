"""avg@k and pass@k of an evaluation with several samples per prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def summarize(rewards: Sequence[Sequence[float | None]], pass_at: Sequence[int] = (),
              success: float = 1.0) -> dict[str, float]:
    """Metrics over prompts.

    Args:
        rewards: for each prompt the rewards of its samples; None for a sample without one (its reward failed).
        pass_at: the k of pass@k.
        success: a reward of at least this counts as correct.

    Returns:
        `avg@n` (n = the largest number of samples of a prompt): the mean over prompts of the mean reward of a prompt's
        samples; `pass@k` for each k: the mean over the prompts that have at least k rewards; `unscored`: how many
        samples have no reward. A mean over no prompts is NaN.
    """
    scored = [[reward for reward in prompt if reward is not None] for prompt in rewards]
    width = max((len(prompt) for prompt in rewards), default=0)
    metrics = {f"avg@{width}": _mean([_mean(prompt) for prompt in scored if prompt])}
    for k in pass_at:
        metrics[f"pass@{k}"] = _mean([pass_at_k(len(prompt), sum(reward >= success for reward in prompt), k)
                                      for prompt in scored if len(prompt) >= k])
    metrics["unscored"] = float(sum(map(len, rewards)) - sum(map(len, scored)))
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
