"""Packing: invariants on random lengths, and cases worked by hand."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.levelling import Levelling
from megarl.data.packing import COST_UNIT, plan_packs, sequence_cost
from megarl.errors import UserMistake


def slots_of(plan):
    """The set of bins of each slot, without regard to the rank."""
    return [sorted(row[slot] for row in plan.bins) for slot in range(plan.slots)]


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 400)), max_size=60), ranks=st.integers(1, 5),
       sequence_multiple=st.sampled_from([1, 2, 4, 8]), tensor=st.sampled_from([1, 2, 3]),
       slots_multiple=st.integers(1, 3), max_tokens=st.integers(24, 300))
def test_promises_hold_for_any_lengths(lengths, ranks, sequence_multiple, tensor, slots_multiple, max_tokens):
    pack_multiple = sequence_multiple * tensor
    plan = plan_packs(lengths, ranks=ranks, max_tokens=max_tokens, sequence_multiple=sequence_multiple,
                      pack_multiple=pack_multiple, slots_multiple=slots_multiple)
    assert len(plan.bins) == ranks
    assert {len(row) for row in plan.bins} == {plan.slots}
    assert plan.slots > 0 and plan.slots % slots_multiple == 0
    assert sorted(i for row in plan.bins for one in row for i in one) == list(range(len(lengths)))
    for rank, row in enumerate(plan.bins):
        for slot, one in enumerate(row):
            tokens = sum(-(-lengths[i] // sequence_multiple) * sequence_multiple for i in one)
            tokens = -(-tokens // pack_multiple) * pack_multiple
            assert plan.tokens[rank, slot] == tokens
            assert tokens <= max_tokens or (len(one) == 1 and one[0] in plan.oversized)
    cap = max_tokens // pack_multiple * pack_multiple
    assert plan.oversized == [i for i, n in enumerate(lengths)
                              if -(-n // sequence_multiple) * sequence_multiple > cap]
    assert 0 < plan.balance <= 1


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=50), seed=st.integers(0, 9))
def test_bins_are_best_fits_rounded_up(lengths, seed):
    """The bin count, against a plain quadratic best-fit-decreasing."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fitting = [k for k, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda k: rooms[k])] -= size
        else:
            rooms.append(100 - size)
    random.Random(seed).shuffle(lengths)
    plan = plan_packs(lengths, ranks=3, max_tokens=100)
    assert plan.best_fit_bins == len(rooms)
    assert plan.slots == -(-len(rooms) // 3)


def test_plan_is_the_same_on_every_call_and_for_every_kind_of_list():
    lengths = np.random.default_rng(0).integers(1, 5000, 300)
    first = plan_packs(lengths, ranks=4, max_tokens=8192)
    assert plan_packs(lengths.tolist(), ranks=4, max_tokens=8192).bins == first.bins
    assert plan_packs(lengths.astype(np.int32), ranks=4, max_tokens=8192).bins == first.bins


def test_hand_case_two_ranks():
    """Best fit: {10}, {7, 3}, {6, 4}: three bins, four on two ranks. The 10 costs 10 and dictates the first slot."""
    plan = plan_packs([3, 10, 4, 7, 6], ranks=2, max_tokens=10, quadratic=0.0)
    assert plan.best_fit_bins == 3 and plan.slots == 2
    assert slots_of(plan) == [[[0, 3], [1]], [[2], [4]]]
    assert plan.cost.tolist() in ([[10 * COST_UNIT, 4 * COST_UNIT], [10 * COST_UNIT, 6 * COST_UNIT]],
                                  [[10 * COST_UNIT, 6 * COST_UNIT], [10 * COST_UNIT, 4 * COST_UNIT]])
    assert plan.balance == pytest.approx(30 / (2 * (10 + 6)))


def test_the_rank_with_less_gets_the_dearer_bin():
    """Slots cost 9, 8 | 5, 3 by construction: rank 1, which got 8, is dealt the 5."""
    plan = plan_packs([9, 8, 5, 3], ranks=2, max_tokens=9, quadratic=0.0)
    assert plan.bins == [[[0], [3]], [[1], [2]]]


def test_cost_of_a_sequence():
    assert sequence_cost(np.array([1000]), quadratic=1e-3).tolist() == [2000 * COST_UNIT]
    assert sequence_cost(np.array([28571]))[0] / COST_UNIT == pytest.approx(2 * 28571, rel=1e-4)


def test_long_sequences_run_at_the_same_time():
    """Two sequences with much attention and six without: the two share a slot, although all bins have 100 tokens."""
    plan = plan_packs([100, 100] + [10] * 60, ranks=2, max_tokens=100, quadratic=0.1)
    assert slots_of(plan)[0] == [[0], [1]]
    assert plan.balance == 1.0


def test_cap_counts_padding():
    """3 tokens pad to 4 each: two fit a cap of 11 (8, and the pack's multiple is 8), a third does not."""
    plan = plan_packs([3, 3, 3], ranks=1, max_tokens=11, sequence_multiple=4, pack_multiple=8)
    assert sorted(map(len, plan.bins[0])) == [1, 2]
    assert plan.tokens.tolist() == [[8, 8]]


def test_fillers_when_there_are_fewer_samples_than_bins():
    plan = plan_packs([5], ranks=2, max_tokens=8, slots_multiple=2)
    assert sorted(len(one) for row in plan.bins for one in row) == [0, 0, 0, 1]
    empty = plan_packs([], ranks=2, max_tokens=8, slots_multiple=3)
    assert empty.bins == [[[], [], []], [[], [], []]]
    assert empty.balance == 1.0


def test_oversized_gets_its_own_bin():
    plan = plan_packs([4, 20, 4], ranks=1, max_tokens=10)
    assert plan.oversized == [1]
    assert plan.bins == [[[1], [0, 2]]]


def test_oversized_refused():
    with pytest.raises(UserMistake, match=r"sample 1 has 20 tokens .* cap of a micro-batch is 10") as caught:
        plan_packs([4, 20, 4], ranks=1, max_tokens=10, on_long="error")
    assert "batch.max_tokens" in caught.value.where


def test_cap_below_the_smallest_pack():
    with pytest.raises(UserMistake, match="smallest pack"):
        plan_packs([4], ranks=1, max_tokens=6, sequence_multiple=4, pack_multiple=8)


def test_length_zero_is_a_bug_of_the_caller():
    with pytest.raises(ValueError):
        plan_packs([3, 0], ranks=1, max_tokens=10)


def test_levelling_swaps_until_equal():
    """8+6 against 3+3: a gap of 8; giving the 6 for a 3 moves 3 and leaves 11 and 9; the cap is no obstacle."""
    sizes = np.array([8, 6, 3, 3])
    levelling = Levelling([[0, 1], [2, 3]], sizes, sizes * COST_UNIT, ranks=2, cap=14)
    levelling.run()
    assert sorted(cost // COST_UNIT for cost in levelling.cost) == [9, 11]
    assert sorted(i for one in levelling.bins for i in one) == [0, 1, 2, 3]


def test_levelling_keeps_the_cap():
    """The swap above would load the second bin with 9 tokens: a cap of 8 allows only moves that keep it."""
    sizes = np.array([8, 6, 3, 3])
    levelling = Levelling([[0, 1], [2, 3]], sizes, sizes * COST_UNIT, ranks=2, cap=8)
    levelling.run()
    assert levelling.load[1] <= 8


def test_lengths_like_those_of_a_long_tail_are_balanced():
    """512 log-normal lengths on 8 ranks: nearly nobody waits (a bound on the optimum is in tests/bench/packing.py)."""
    lengths = np.exp(np.random.default_rng(3).normal(np.log(1000), 0.7, 512)).astype(int).clip(16, 8192)
    plan = plan_packs(lengths, ranks=8, max_tokens=16384)
    assert plan.balance > 0.99
    assert plan.slots == -(-plan.best_fit_bins // 8)
