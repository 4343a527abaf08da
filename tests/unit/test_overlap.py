"""The overlap simulator: two runs by hand, what must hold for any run, and bounds that nothing beats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.admission import Choice
from megarl.rollout.overlap import Setting, ks_distance, simulate


def test_without_lag_by_hand():
    """One slot; samples of 3, 5 and 2 s; 2 s of training and 1 s of publishing: one after the other."""
    seen = simulate(Setting(1, 1.0, 1, 2.0, 1.0, 0, 3), np.array([[3], [5], [2]]))
    assert seen.took.tolist() == [3, 11, 16] and seen.ended.tolist() == [6, 14, 19]
    assert sum(seen.waited.values()) == 3 + 5 + 2 and seen.lag == {0: 0, 1: 0, 2: 0}


def test_with_lag_by_hand():
    """Group 1 runs 3..9, one second of which engines stand still (5..6); group 2, issued at 6, runs 9..11."""
    seen = simulate(Setting(1, 1.0, 1, 2.0, 1.0, 1, 3), np.array([[3], [5], [2]]))
    assert seen.took.tolist() == [3, 9, 12] and seen.ended.tolist() == [6, 12, 15]
    assert seen.lag == {0: 0, 1: 1, 2: 1} and seen.issued == [2, 3, 3]
    assert sum(seen.waited.values()) == 3 + 3
    assert seen.busy[0] == (0.0, 1) and (11.0, 0) in seen.busy


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.floats(0, 30),
       st.integers(0, 2**32 - 1))
def test_of_any_run(max_lag, slots, groups, samples, train_s, seed):
    steps = 8
    lengths = np.random.default_rng(seed).integers(1, 60, (groups * steps, samples))
    one = Setting(slots, 0.1, groups, train_s, 0.3, max_lag, steps)
    seen = simulate(one, lengths)
    trained = Counter(number for numbers in seen.taken for number in numbers)
    assert trained == Counter(range(groups * steps)) and not seen.dropped  # each once, none thrown away
    assert all(len(numbers) == groups for numbers in seen.taken) and max(seen.lag.values()) <= max_lag
    assert (np.diff(seen.ended) >= train_s + 0.3 - 1e-9).all()
    times, busy = np.array(seen.busy).T
    assert busy.max() <= slots and (np.diff(times) >= 0).all()
    # every token took its time in some slot; while engines stand still (0.3 s a step) busy slots wait
    held = float((np.diff(times) * busy[:-1]).sum())
    tokens = float(lengths.sum() * 0.1)
    assert tokens - 1e-6 <= held <= tokens + slots * 0.3 * steps + 1e-6
    if not max_lag:
        span = seen.ended[-1]
        assert span >= steps * (train_s + 0.3) + tokens / slots - 1e-6


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_equal_samples_reach_the_bound(max_lag):
    """Full waves: without lag sampling and training add up, with lag the slower one counts."""
    one = Setting(8, 0.5, 4, 3.0, 0.25, max_lag, 40)
    lengths = np.full((160, 4), 10)  # two waves of 5 s
    seen = simulate(one, lengths)
    period = 10.25 if max_lag else 13.25
    assert one.bound(lengths) == pytest.approx(3600 / period)
    assert seen.steps_per_hour(5) == pytest.approx(3600 / period)


def test_bound_of_freshness():
    """One long sample in a step keeps the step after max_lag more from starting: (40 + 3) / 2 + 0.25 s a step."""
    one = Setting(1000, 0.5, 2, 3.0, 0.25, 1, 40)
    lengths = np.tile([[80, 1], [1, 1]], (40, 1))
    assert one.bound(lengths) == pytest.approx(3600 / 21.75)
    assert simulate(one, lengths).steps_per_hour(5) == pytest.approx(one.bound(lengths))


def test_bound_of_those_who_do_not_know_lengths():
    """Two slots, a step's samples of 1, 1, 4 and 2 tokens in this order: the third begins at 1 and ends at 5, although
    all of it would fit into 4. Without lag, what is issued when a step begins keeps exactly this time.
    """
    one = Setting(2, 0.5, 2, 3.0, 0.25, 0, 40)
    lengths = np.tile([[1, 1], [4, 2]], (40, 1))
    assert one.bound(lengths) == pytest.approx(3600 / (4 * 0.5 + 3 + 0.25))
    assert one.blind_bound(lengths) == pytest.approx(3600 / (5 * 0.5 + 3 + 0.25))
    assert simulate(one, lengths).steps_per_hour(5) == pytest.approx(one.blind_bound(lengths))
    lagging = Setting(2, 0.5, 2, 3.0, 0.25, 1, 40)
    assert lagging.blind_bound(lengths) == pytest.approx(3600 / (max(4 * 0.5, 3, (5 * 0.5 + 3) / 2) + 0.25))


def test_another_rule_drops_what_became_too_old():
    """First come, first trained: the long group of each pair is never among them."""
    def first(pending, need, step, max_lag):
        done = sorted((one for one in pending if one.finished is not None), key=lambda one: one.finished)
        return Choice([one.number for one in done[:need]]) if len(done) >= need else Choice(None, "samples")

    lengths = np.tile([[1], [1000]], (40, 1))
    seen = simulate(Setting(100, 1.0, 1, 1.0, 0.0, 1, 10), lengths, first)
    assert seen.dropped and all(number % 2 for number in seen.dropped)


def test_kolmogorov_smirnov_by_hand():
    assert ks_distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4])) == 0
    assert ks_distance(np.array([1, 2]), np.array([3])) == 1
    assert ks_distance(np.array([1, 1, 2, 9]), np.array([1, 2, 2, 3])) == pytest.approx(0.25)
