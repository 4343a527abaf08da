"""From rewards to advantages and token weights. Functions of the whole step's samples, the same on every rank."""

from __future__ import annotations

import torch

from megarl.data.sample import Group
from megarl.objective.recipes import Objective


def group_advantages(rewards_n: torch.Tensor, group_n: torch.Tensor, objective: Objective,
                     task_n: torch.Tensor | None = None) -> torch.Tensor:
    """(reward - mean of its group) / (std + eps), or without the division (objective.normalize_std).

    The standard deviation is the group's, or, with objective.std_over "task", that of all samples of the same task
    around the means of their groups: sqrt(sum of (reward - group mean)^2 / (samples - ddof * groups)). Then tasks whose
    rewards are on different scales weigh the same in a step, and a group in which few samples differ is not blown up.

    A group whose rewards are all equal, or with one sample, has advantage 0.

    Args:
        rewards_n: floating point [N].
        group_n: int64 [N], numbers from 0.
        objective: normalize_std, std_over, std_ddof and std_eps are used (DeepSeekMath, section 4.1.2).
        task_n: int64 [N], numbers from 0, the same throughout a group; one task if not given.

    Returns:
        [N], of the rewards' dtype.
    """
    groups = int(group_n.max()) + 1 if len(group_n) else 0
    count_g = torch.bincount(group_n, minlength=groups).to(rewards_n.dtype)
    mean_g = rewards_n.new_zeros(groups).index_add(0, group_n, rewards_n) / count_g.clamp(min=1)
    centred_n = rewards_n - mean_g[group_n]
    # a mean of equal rewards need not equal them to the last bit; dividing that residue by eps would make a signal
    low_g = rewards_n.new_full((groups,), torch.inf).scatter_reduce(0, group_n, rewards_n, "amin")
    high_g = rewards_n.new_full((groups,), -torch.inf).scatter_reduce(0, group_n, rewards_n, "amax")
    centred_n = torch.where((low_g == high_g)[group_n], torch.zeros_like(centred_n), centred_n)
    if not objective.normalize_std:
        return centred_n
    squares_g = rewards_n.new_zeros(groups).index_add(0, group_n, centred_n.square())
    freedom_g = (count_g - objective.std_ddof * (count_g > 0)).clamp(min=0)
    if objective.std_over == "task":
        task_g = torch.zeros(groups, dtype=torch.int64)
        if task_n is not None:
            task_g[group_n] = task_n
        tasks = int(task_g.max()) + 1 if groups else 0
        squares_g, freedom_g = (rewards_n.new_zeros(tasks).index_add(0, task_g, sums)[task_g]
                                for sums in (squares_g, freedom_g))
    std_g = (squares_g / freedom_g.clamp(min=1)).sqrt() + objective.std_eps
    return centred_n / torch.where(std_g == 0, torch.ones_like(std_g), std_g)[group_n]


def episode_values(values_n: torch.Tensor, episode_n: torch.Tensor, reduce: str) -> torch.Tensor:
    """One value per episode from its samples' values: "sum", "amin", "amax".

    Args:
        values_n: [N].
        episode_n: int64 [N], numbers from 0, all present.
    Returns:
        [E], of the same dtype.
    """
    episodes = int(episode_n.max()) + 1 if len(episode_n) else 0
    return values_n.new_zeros(episodes).scatter_reduce(0, episode_n, values_n, reduce, include_self=False)


def has_signal(group: Group) -> bool:
    """Whether a scored group can teach anything: two of its rewards differ (DAPO, eq. 11), or where turns are credited
    apart some advantage is not 0."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) > 1 or any(sample.advantages is not None and bool(sample.advantages.any())
                                   for sample in group.samples)


def overlong_punishment(lengths_n: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Soft overlong punishment, to be added to rewards (DAPO, eq. 13).

    0 up to max_response_tokens - overlong_buffer, then falling linearly to -overlong_penalty at max_response_tokens.

    Args:
        lengths_n: response tokens, [N].
    Returns:
        float64 [N]; zeros where the buffer is 0.
    """
    excess = lengths_n.double() - (objective.max_response_tokens - objective.overlong_buffer)
    if not objective.overlong_buffer:
        return torch.zeros_like(excess)
    return -objective.overlong_penalty * (excess / objective.overlong_buffer).clamp(0, 1)


def token_weights(lengths_n: torch.Tensor, objective: Objective, episode_n: torch.Tensor | None = None
                  ) -> torch.Tensor:
    """The weight of each token of each sample, such that the step's loss is the sum of weight * token loss.

    Where an episode has several samples, they are one sequence: "sequence_mean" divides by the tokens of the whole
    episode and by the number of episodes, "constant" counts episodes. So an episode weighs as much as another one,
    into however many samples its template has split it. Each sampled token is in one sample, so "token_mean" needs
    nothing.

    The divisors are global: counted over all samples of the optimizer step that are trained on, on all ranks, before
    the first forward. A sample left out beforehand (overlong filter, failed reward) counts in no divisor; a token that
    importance sampling masks later keeps its place in it.

    Args:
        lengths_n: trained tokens of each trained sample of the step, [N], all above 0.
        objective: the aggregation.
        episode_n: int64 [N], equal for the samples of an episode; each is its own if not given.
    Returns:
        float64 [N].
    """
    lengths = lengths_n.double()
    if objective.aggregation == "token_mean":
        return torch.ones_like(lengths) / lengths.sum()
    episodes = len(lengths)
    if episode_n is not None:
        numbers, episode_n = episode_n.unique(return_inverse=True)
        episodes = len(numbers)
    if objective.aggregation == "sequence_mean":
        whole = lengths if episode_n is None else episode_values(lengths, episode_n, "sum")[episode_n]
        return 1 / (whole * episodes)
    return torch.ones_like(lengths) / (episodes * objective.max_response_tokens)
