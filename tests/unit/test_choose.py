"""Which placement and which schedule is taken, against the simulator asked one by one."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.pipeline.choose import choose, choose_placement, estimates, model_costs
from megarl.pipeline.generators import SCHEDULES, fitting
from megarl.pipeline.order import order
from megarl.pipeline.simulate import simulate

EQUAL = [1.0] * 16


def test_within_a_v():
    """Without anything to hide ZB-V has the smaller bubble; where pairs hide communication, DualPipeV is faster."""
    bare = model_costs(4, 8, EQUAL, (1, 1, 1))
    assert choose("v", 4, 2, bare) == "zb-v"
    # expert all-to-all as long as the computation, of which pairs hide 90 %: F = I = 2, W = 1
    hiding = model_costs(4, 8, EQUAL, (2, 2, 1), hidden=0.45)
    assert choose("v", 4, 2, hiding) == "dualpipev"
    assert choose("v", 4, 2, hiding, memory=4) == "zb-v"  # DualPipeV holds 4.5
    assert choose("v", 4, 2, hiding, memory=1) == "zb-v"  # nothing fits: the one that holds least
    few = model_costs(4, 8, EQUAL[:7], (2, 2, 1), hidden=0.45)
    assert choose("v", 4, 2, few) == "zb-v"  # 7 < 2P micro-batches: there are no pairs


def test_within_a_loop():
    assert choose("looped", 4, 1, model_costs(4, 4, EQUAL, (1, 1, 1))) == "zb-h1"
    assert choose("looped", 4, 1, model_costs(4, 4, EQUAL, (1, 1, 0))) == "1f1b"  # no W: a tie
    assert choose("looped", 4, 2, model_costs(4, 8, EQUAL, (1, 1, 1))) == "interleaved"
    assert choose("mirrored", 4, 2, model_costs(4, 4, EQUAL, (1, 1, 1))) == "dualpipe"
    assert choose("looped", 1, 1, model_costs(1, 1, EQUAL, (1, 1, 1))) == "1f1b"


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_is_taken(seed: int):
    draw = np.random.default_rng(seed)
    for placement, chunks, names in (("v", 2, ("zb-v", "dualpipev")), ("looped", 1, ("1f1b", "zb-h1"))):
        for count in (3, 9, 13):
            costs = model_costs(4, 4 * chunks, draw.uniform(0.2, 3, count), draw.uniform(0.5, 2, 3),
                                hop=draw.uniform(0, 0.3), hidden=draw.uniform(0, 1))
            spans = {name: simulate(fitting(name, 4, count, chunks)[0], costs).makespan for name in names}
            assert {e.name: e.makespan for e in estimates(placement, 4, chunks, costs)} == spans
            assert spans[choose(placement, 4, chunks, costs)] == min(spans.values())


def test_each_schedule_in_its_own_order():
    """DualPipeV gains more from ordering than ZB-V: priced as they come, its pairs seem not to be worth it."""
    draw, flips = np.random.default_rng(0), 0
    for _ in range(8):
        costs = model_costs(4, 8, np.exp(draw.normal(0, 1, 12)), (1.5, 1.5, 1), hidden=0.3)
        spans = {name: simulate(fitting(name, 4, 12, 2)[0], costs.reordered(order(costs, name, 4, 2))).makespan
                 for name in ("zb-v", "dualpipev")}
        assert spans[choose("v", 4, 2, costs, reorder=True)] == min(spans.values())
        flips += choose("v", 4, 2, costs) != choose("v", 4, 2, costs, reorder=True)
    assert flips >= 4


def test_equal_costs_are_priced_once():
    choose.cache_clear()
    for _ in range(3):  # arrays of their own each time
        choose("v", 4, 2, model_costs(4, 8, EQUAL, (1, 1, 1)))
    assert choose.cache_info().misses == 1


def test_placement():
    assert choose_placement(4, 48, EQUAL)[0] == "v"
    name, why = choose_placement(4, 7, EQUAL)
    assert name == "looped" and why == "7 layers are too few for the 8 stages of a V"
    assert choose_placement(1, 48, EQUAL)[0] == "looped"
    assert choose_placement(4, 48, EQUAL, ratio=(2, 2, 1), hidden=0.45)[1].startswith("dualpipev is the cheapest")
    # a V passes twice as many messages; if they are slow, one stage a rank is better
    assert choose_placement(4, 48, EQUAL, hop=0.2)[0] == "v" and choose_placement(4, 48, EQUAL, hop=4.0)[0] == "looped"
    # lengths count, not their unit
    long_tail = [1.0] * 12 + [9.0] * 4
    assert choose_placement(8, 48, long_tail) == choose_placement(8, 48, [4096 * one for one in long_tail])


def test_placement_is_the_cheaper_one_by_hand():
    """At F = I = W: ZB-H1 loses (P - 1)(F + I - W), ZB-V (P - 1)F/2 (`formulas`)."""
    assert choose_placement(4, 48, EQUAL)[1] == (
        f"zb-v is the cheapest of 1f1b, zb-h1, zb-v and dualpipev for 16 micro-batches: {(48 + 1.5) / 48:.3f} times a "
        "rank's work, 4 micro-batches' activations")
    assert set(SCHEDULES) > {"1f1b", "zb-h1", "zb-v", "dualpipev"}
