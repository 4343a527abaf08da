"""Advantages, token weights, overlong punishment, the signal of a group: worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import ObjectiveConfig
from megarl.data.sample import Group, Prompt, Sample
from megarl.objective.advantages import (
    episode_values,
    group_advantages,
    has_signal,
    overlong_punishment,
    token_weights,
)
from megarl.objective.recipes import resolve
from megarl.objective.turns import returns, turn_advantages


def objective(max_response_tokens=10, **fields):
    return resolve(ObjectiveConfig(**fields), max_response_tokens)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_group_advantages_by_hand():
    # Group 0 (rewards 1, 0, 0, 1; mean .5): squares .25 x 4 = 1; ddof 1: std = sqrt(1/3); ddof 0: std = .5.
    # Group 1 (rewards 2, 5; mean 3.5): squares 2.25 x 2 = 4.5; ddof 1: std = sqrt(4.5); ddof 0: std = 1.5.
    rewards_n, group_n = f64(1, 2, 0, 0, 5, 1), torch.tensor([0, 1, 0, 0, 1, 0])
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.5 / (math.sqrt(4.5) + 1e-6)
    got = group_advantages(rewards_n, group_n, objective(algorithm="grpo"))
    torch.testing.assert_close(got, f64(a, -b, -a, -a, b, a), rtol=1e-12, atol=0)
    got = group_advantages(rewards_n, group_n, objective(algorithm="grpo", std_ddof=0, std_eps=0.5))
    torch.testing.assert_close(got, f64(0.5, -0.75, -0.5, -0.5, 0.75, 0.5), rtol=1e-12, atol=0)
    got = group_advantages(rewards_n, group_n, objective(algorithm="dr_grpo"))
    torch.testing.assert_close(got, f64(0.5, -1.5, -0.5, -0.5, 1.5, 0.5), rtol=1e-12, atol=0)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_groups_without_variance_get_exactly_zero(algorithm, eps):
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1 in binary: the mean of equal rewards may differ from them in the last bit.
    rewards_n, group_n = f64(0.1, 0.1, 0.1, 7.0), torch.tensor([0, 0, 0, 1])
    got = group_advantages(rewards_n, group_n, objective(algorithm=algorithm, std_eps=eps))
    assert got.tolist() == [0, 0, 0, 0]


def test_a_group_lacking_samples_uses_those_that_are_there():
    # Two of four samples were dropped: mean and std are those of the two, whatever their number in the table.
    got = group_advantages(f64(3, 1), torch.tensor([4, 4]), objective(algorithm="grpo", std_ddof=0, std_eps=0))
    assert got.tolist() == [1, -1]
    assert group_advantages(f64(), torch.tensor([], dtype=torch.int64), objective(algorithm="grpo")).shape == (0,)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=20), st.randoms())
def test_advantages_follow_their_samples(pairs, random):
    """Permuting samples permutes advantages; each group's sum is 0; shifting a group's rewards changes nothing."""
    order = list(range(len(pairs)))
    random.shuffle(order)
    group_n, rewards_n = (torch.tensor(column) for column in zip(*pairs, strict=True))
    one = objective(algorithm="grpo")
    got = group_advantages(rewards_n.double(), group_n, one)
    torch.testing.assert_close(group_advantages(rewards_n[order].double(), group_n[order], one), got[order])
    torch.testing.assert_close(group_advantages((rewards_n + 5 * group_n).double(), group_n, one), got)
    sums = torch.zeros(5, dtype=torch.float64).index_add(0, group_n, got)
    torch.testing.assert_close(sums, torch.zeros_like(sums))


def test_token_weights_by_hand():
    lengths_n = torch.tensor([2, 5, 1])
    # mean over tokens, then over 3 sequences: 1/(2*3), 1/(5*3), 1/(1*3); every sequence weighs 1/3
    torch.testing.assert_close(token_weights(lengths_n, objective(algorithm="gspo")), f64(1 / 6, 1 / 15, 1 / 3))
    # 8 tokens in all: 1/8 each
    torch.testing.assert_close(token_weights(lengths_n, objective(algorithm="dapo")), f64(1 / 8, 1 / 8, 1 / 8))
    # 3 sequences x 10 tokens at most: 1/30 each
    torch.testing.assert_close(token_weights(lengths_n, objective(algorithm="dr_grpo")), f64(1 / 30, 1 / 30, 1 / 30))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo"])
def test_a_step_without_trained_samples_has_no_weights(algorithm):
    got = token_weights(torch.tensor([], dtype=torch.int64), objective(algorithm=algorithm))
    assert got.shape == (0,) and got.dtype == torch.float64


def test_overlong_punishment_by_hand():
    # At most 10 tokens, a buffer of 4: free up to 6, then -1/4, -2/4, -3/4, -1 (times 2), never less.
    one = objective(overlong_buffer=4, overlong_penalty=2.0)
    got = overlong_punishment(torch.tensor([1, 6, 7, 8, 9, 10, 11]), one)
    torch.testing.assert_close(got, f64(0, 0, -0.5, -1, -1.5, -2, -2))
    assert not overlong_punishment(torch.tensor([1, 10]), objective()).any()


def test_signal_of_a_group():
    prompt = Prompt(0, 0, 0, "", np.zeros(1, np.int32))

    def group(*rewards):
        ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return Group(prompt, [Sample(prompt, n, 0, ids, logprobs, "stop", reward=one) for n, one in enumerate(rewards)])

    assert has_signal(group(1.0, 0.0, 1.0))
    assert not has_signal(group(1.0, 1.0)) and not has_signal(group(0.0, 0.0)) and not has_signal(group(0.5))
    assert not has_signal(group(1.0, None, 1.0))  # a failed reward is no reward


def test_a_standard_deviation_over_tasks_by_hand():
    # Task 0: groups 0 (rewards 1, 0, 0, 1; squares 1) and 2 (3, 3; squares 0): ddof 1: sqrt(1 / (6 - 2)) = .5;
    # ddof 0: sqrt(1 / 6). Task 1: group 1 (200, 500; squares 45000): ddof 1: sqrt(45000 / 1); ddof 0: sqrt(45000 / 2).
    rewards_n = f64(1, 200, 0, 0, 500, 1, 3, 3)
    group_n, task_n = torch.tensor([0, 1, 0, 0, 1, 0, 2, 2]), torch.tensor([0, 1, 0, 0, 1, 0, 0, 0])
    one = objective(algorithm="grpo", std_over="task", std_eps=0)
    a, b = 0.5 / 0.5, 150 / math.sqrt(45000)
    torch.testing.assert_close(group_advantages(rewards_n, group_n, one, task_n), f64(a, -b, -a, -a, b, a, 0, 0),
                               rtol=1e-12, atol=0)
    one = objective(algorithm="grpo", std_over="task", std_eps=0.25, std_ddof=0)
    a, b = 0.5 / (math.sqrt(1 / 6) + 0.25), 150 / (math.sqrt(45000 / 2) + 0.25)
    torch.testing.assert_close(group_advantages(rewards_n, group_n, one, task_n), f64(a, -b, -a, -a, b, a, 0, 0),
                               rtol=1e-12, atol=0)
    whole = group_advantages(rewards_n, group_n, one)  # no tasks: all are one
    torch.testing.assert_close(whole[0] / whole[4], f64(0.5 / 150)[0])


def test_parts_of_an_episode_by_hand():
    # Prompt 7: episode 0 in two parts, episodes 1 and 2 whole. Mean of the three rewards 3, 0, 0 is 1, not 6 / 4.
    episode_n = torch.tensor([0, 0, 1, 2])
    rewards_e = episode_values(f64(3, 3, 0, 0), episode_n, "amax")
    got = group_advantages(rewards_e, torch.tensor([0, 0, 0]), objective(algorithm="dr_grpo"))[episode_n]
    assert got.tolist() == [2, 2, -1, -1]
    # Tokens 2 + 4 of one episode, 3 and 1 of the others: of a third each, by tokens of the whole episode.
    lengths_n = torch.tensor([2, 4, 3, 1])
    got = token_weights(lengths_n, objective(aggregation="sequence_mean"), episode_n)
    torch.testing.assert_close(got, f64(1 / 18, 1 / 18, 1 / 9, 1 / 3), rtol=1e-12, atol=0)
    assert (got * lengths_n).sum() == pytest.approx(1)
    got = token_weights(lengths_n, objective(aggregation="constant"), episode_n)
    torch.testing.assert_close(got, f64(1, 1, 1, 1) / (3 * 10), rtol=1e-12, atol=0)
    got = token_weights(lengths_n, objective(aggregation="token_mean"), episode_n)
    torch.testing.assert_close(got, f64(1, 1, 1, 1) / 10, rtol=1e-12, atol=0)
    # Numbers of episodes need not be dense: a minibatch has some of the experience's.
    got = token_weights(lengths_n, objective(aggregation="sequence_mean"), torch.tensor([5, 5, 9, 11]))
    torch.testing.assert_close(got, f64(1 / 18, 1 / 18, 1 / 9, 1 / 3), rtol=1e-12, atol=0)


def test_splitting_an_episode_changes_no_weight():
    """The sum over an episode's tokens is that of an episode that stayed whole."""
    for aggregation in ("sequence_mean", "token_mean", "constant"):
        one = objective(aggregation=aggregation)
        whole = token_weights(torch.tensor([6, 3]), one) * torch.tensor([6, 3])
        parts = token_weights(torch.tensor([1, 5, 3]), one, torch.tensor([0, 0, 1])) * torch.tensor([1, 5, 3])
        torch.testing.assert_close(f64(parts[0] + parts[1], parts[2]), whole, rtol=1e-12, atol=0)


def test_returns_by_hand():
    assert returns([1, 0, 2], 1.0) == [3, 2, 2] and returns([1, 0, 2], 0.5) == [1.5, 1, 2]
    assert returns([4, 1], 0.0) == [4, 1] and returns([], 1.0) == []


def test_turn_advantages_by_hand():
    # Returns at discount .5: [2, 2], [1, 0], [0]. Turn 0: mean 1, turn 1: mean 1.
    rewards = [[1, 2], [1, 0], [0]]
    got = turn_advantages(rewards, 0.5, objective(algorithm="dr_grpo"))
    assert got == [[1, 1], [0, -1], [-1]]
    # Turn 0: squares 1 + 0 + 1, ddof 1: std 1. Turn 1: squares 1 + 1, ddof 1: std sqrt(2).
    got = turn_advantages(rewards, 0.5, objective(algorithm="grpo", std_eps=0))
    root = 1 / math.sqrt(2)
    assert [pytest.approx(episode) for episode in got] == [[1, root], [0, -root], [-1]]


def test_turn_advantages_with_one_reward_at_the_end_are_grpos():
    rewards = f64(1, 0, 0.25, 1)
    one = objective(algorithm="grpo")
    plain = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), one)
    got = turn_advantages([[0, 0, reward] for reward in rewards.tolist()], 1.0, one)
    assert got == [[value] * 3 for value in plain.tolist()]


def test_a_turn_that_no_other_episode_reaches_has_no_advantage():
    got = turn_advantages([[0, 0, 5], [1]], 1.0, objective(algorithm="grpo"))
    assert got[0][1:] == [0, 0] and got[0][0] > 0 > got[1][0]
