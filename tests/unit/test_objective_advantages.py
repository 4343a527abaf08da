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
from megarl.objective.advantages import group_advantages, has_signal, overlong_punishment, token_weights
from megarl.objective.recipes import resolve


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
