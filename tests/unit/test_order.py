"""The order of unequal micro-batches: a permutation, never slower than arrival, the best where all can be tried."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from megarl.pipeline import order as ordering
from megarl.pipeline.choose import model_costs
from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.order import hills, long_first, order, short_at_both_ends
from megarl.pipeline.simulate import Costs, simulate, simulator


def costs_of(name: str, ranks: int, weights) -> tuple[Costs, int]:
    chunks = SCHEDULES[name].chunks
    stages = ranks if SCHEDULES[name].placement == "mirrored" else ranks * chunks
    return model_costs(ranks, stages, weights, (1.0, 1.1, 0.8), hop=0.05), chunks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_never_slower_than_arrival_or_the_baselines(name: str, seed: int):
    draw = np.random.default_rng(seed)
    for ranks, count in ((2, 4), (4, 1), (4, 8), (4, 13)):
        costs, chunks = costs_of(name, ranks, np.exp(draw.normal(0, 1, count)))
        found = order(costs, name, ranks, chunks)
        assert sorted(found) == list(range(count)) and all(type(one) is int for one in found)
        schedule = simulator(name, ranks, count, chunks).schedule
        taken = simulate(schedule, costs.reordered(found)).makespan
        for other in (np.arange(count), long_first(costs), short_at_both_ends(costs), *hills(costs)):
            assert taken <= simulate(schedule, costs.reordered(other)).makespan
        order.cache_clear()
        assert order(costs, name, ranks, chunks) == found


def test_an_arrival_order_that_no_rule_reaches_is_kept(monkeypatch):
    """The order that a full search found, given as the arrival order, with no trials left to find it again."""
    for seed in range(3):
        costs, chunks = costs_of("dualpipev", 4, np.exp(np.random.default_rng(seed).normal(0, 1, 16)))
        arrived = costs.reordered(order(costs, "dualpipev", 4, chunks))
        monkeypatch.setattr(ordering, "_MOST_ROUNDS", 0)
        assert order(arrived, "dualpipev", 4, chunks) == tuple(range(16))
        monkeypatch.undo()


def test_a_change_for_the_worse_is_not_kept(monkeypatch):
    """With one trial a round, nearly all of them are worse than the best hill."""
    monkeypatch.setattr(ordering, "_TRIALS", 1)
    monkeypatch.setattr(ordering, "_MOST_ROUNDS", 2)
    for seed in range(5):
        costs, chunks = costs_of("1f1b", 4, np.exp(np.random.default_rng(seed).normal(0, 1, 24)))
        ours = order.__wrapped__(costs, "1f1b", 4, chunks)
        spans = simulator("1f1b", 4, 24, chunks).makespans(costs, np.array([ours, *hills(costs)]))
        assert spans[0] <= spans[1:].min()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_close_to_the_best_of_all_orders(name: str):
    gaps = []
    for seed in range(4):
        costs, chunks = costs_of(name, 2, np.exp(np.random.default_rng(seed).normal(0, 1, 6)))
        simulated = simulator(name, 2, 6, chunks)
        best = simulated.makespans(costs, np.array(list(permutations(range(6))))).min()
        gaps.append(simulated.run(costs.reordered(order(costs, name, 2, chunks))).makespan / best - 1)
    assert min(gaps) == 0 and max(gaps) < 0.01


def test_long_tail_gains():
    """A tenth and more over long-first for 1F1B at P = 4, M = 16; the bench has the full table."""
    ratios = []
    for seed in range(5):
        costs, chunks = costs_of("1f1b", 4, np.exp(np.random.default_rng(seed).normal(0, 1, 16)))
        simulated = simulator("1f1b", 4, 16, chunks)
        found = order(costs, "1f1b", 4, chunks)
        ours, base = simulated.makespans(costs, np.array([found, long_first(costs)]))
        ratios.append(ours / base)
    assert np.mean(ratios) < 0.93


def test_equal_microbatches_stay():
    assert order(model_costs(4, 4, [1.0] * 9, (1, 1, 1)), "1f1b", 4, 1) == tuple(range(9))


def test_rules_by_hand():
    costs = model_costs(2, 2, [3.0, 1.0, 4.0, 2.0], (1, 1, 1))
    assert long_first(costs).tolist() == [2, 0, 3, 1]
    assert short_at_both_ends(costs).tolist() == [1, 0, 2, 3]  # lengths 1 3 4 2
    lengths = [[[3, 1, 4, 2][m] for m in one] for one in hills(costs)]
    assert lengths == [[4, 3, 2, 1], [4, 3, 2, 1], [2, 4, 3, 1], [2, 3, 4, 1], [1, 2, 3, 4]]
