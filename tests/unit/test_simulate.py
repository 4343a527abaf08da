"""Simulated schedules against published formulas, timelines worked out by hand, and a walk in plain Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from formulas import BUBBLE, PEAK, settings

from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.schedule import Op, Pair, Schedule, parts, placement
from megarl.pipeline.simulate import Costs, Simulator, Timeline, simulate


def priced(name: str, ranks: int, microbatches: int, chunks: int, hidden: float = 0.0, **parts_: float) -> Timeline:
    """With costs per 1/P of the model."""
    schedule = SCHEDULES[name].generate(ranks, microbatches, chunks)
    share = ranks / schedule.stages
    return simulate(schedule, Costs.scaled(schedule.stages, np.full(microbatches, share), hidden=hidden, **parts_))


@pytest.mark.parametrize("name", BUBBLE)
def test_published_bubbles_and_peaks(name: str):
    """At F = I = W; exact in binary, since all times are sums of quarters."""
    chosen = settings(name)
    assert len(chosen) >= 12
    for ranks, microbatches, chunks in chosen:
        line = priced(name, ranks, microbatches, chunks)
        assert line.makespan - min(line.busy) == BUBBLE[name](ranks, chunks, 1, 2, 1, 3), (ranks, microbatches, chunks)
        assert max(line.peak_memory) == PEAK[name](ranks, chunks, microbatches), (ranks, microbatches, chunks)
        if SCHEDULES[name].splits:  # memory is freed by W: every rank holds as much as the first
            assert len(set(line.peak_memory)) == 1
        assert set(line.busy) == {3.0 * microbatches}
        assert line.bubble_fraction == pytest.approx(1 - 3 * microbatches / line.makespan, abs=1e-12)
    if SCHEDULES[name].pairs:  # a pair may take less than its parts; ranks then differ in how much they work
        for ranks, microbatches, chunks in chosen:
            for hidden in (0.125, 0.5):
                line = priced(name, ranks, microbatches, chunks, hidden=hidden)
                bubble = BUBBLE[name](ranks, chunks, 1, 2, 1, 3 - 2 * hidden)
                assert line.makespan - min(line.busy) == bubble, (ranks, microbatches, hidden)


def test_zb_v_has_no_bubble_inside_a_ranks_own_span():
    for ranks, microbatches, chunks in settings("zb-v"):
        line = priced("zb-v", ranks, microbatches, chunks)
        for start, end in zip(line.start, line.end, strict=True):
            assert (start[1:] == end[:-1]).all()


def test_by_hand_1f1b_of_unequal_microbatches():
    """P = 2, M = 2; micro-batch 1 is three times as long; F 1, I 2, W 1, hop 0.5.

    rank 0:  F0 0-1      F1 1-4      B0 6-9      B1 18-27
    rank 1:  F0 1.5-2.5  B0 2.5-5.5  F1 5.5-8.5  B1 8.5-17.5
    """
    schedule = SCHEDULES["1f1b"].generate(2, 2, 1)
    line = simulate(schedule, Costs.scaled(2, [1, 3], input_grad=2.0, hop=0.5))
    assert line.start[0].tolist() == [0, 1, 6, 18] and line.end[0].tolist() == [1, 4, 9, 27]
    assert line.start[1].tolist() == [1.5, 2.5, 5.5, 8.5] and line.end[1].tolist() == [2.5, 5.5, 8.5, 17.5]
    assert line.makespan == 27 and line.busy == (16, 16) and line.peak_live == (2, 1)
    assert line.bubble == (1 - 16 / 27, 1 - 16 / 27)


def test_by_hand_pairs_splits_and_a_local_turn():
    """One rank of a V with one hop-free turn, then two ranks whose pair waits for both inputs."""
    turn = Schedule("v", 1, placement("v", 1), ((Op("F", 0, 0), Op("F", 1, 0), Op("I", 1, 0), Op("B", 0, 0),
                                                 Op("W", 1, 0)),))
    line = simulate(turn, Costs(*(np.array([[a], [b]], np.float64) for a, b in ((1, 2), (4, 8), (16, 32), (0, 0))),
                                np.array([100.0])))
    assert line.end[0].tolist() == [1, 3, 11, 31, 63]  # F 1, F 2, I 8, B 4 + 16, W 32; no hops
    assert line.peak_live == (2,) and line.peak_memory == (1.0,)  # both halves of what one rank holds

    F, B = (lambda s, m: Op("F", s, m)), (lambda s, m: Op("B", s, m))
    pairs = Schedule("pair", 2, placement("looped", 2), (
        (F(0, 0), F(0, 1), B(0, 0), B(0, 1)),
        (F(1, 0), Pair(F(1, 1), B(1, 0)), B(1, 1))))
    costs = Costs(np.array([[1.0, 5.0], [2.0, 3.0]]), np.array([[1.0, 1.0], [4.0, 6.0]]), np.ones((2, 2)),
                  np.array([[0.5, 0.5], [0.25, 2.0]]), np.array([0.5, 10.0]))
    line = simulate(pairs, costs)
    # F(1, 0) 1.5-3.5; F(0, 1) ends at 6, arrives at 16; the pair takes 3 + 5 - 2 (its F) - 0.25 (its B) = 5.75
    assert line.start[1].tolist() == [1.5, 16, 21.75] and line.end[1].tolist() == [3.5, 21.75, 28.75]
    assert line.start[0].tolist() == [0, 1, 22.25, 38.75]  # each gradient one hop later
    assert line.peak_live == (2, 2)  # the pair makes new activations before it frees the old ones


def walked(schedule: Schedule, costs: Costs) -> dict[Op, tuple[float, float]]:
    """Start and end of every operation's item, found by asking again and again which rank can go on."""
    done: dict[Op, tuple[float, float]] = {}
    rank_of = {op: rank for rank in range(schedule.ranks) for op in schedule.ops(rank)}
    at, free = [0] * schedule.ranks, [0.0] * schedule.ranks

    def source(op: Op) -> Op | None:
        near = op.stage - 1 if op.kind == "F" else op.stage + 1
        kinds = {"F": "F", "W": ""}.get(op.kind, "BI")
        return next((o for k in kinds if (o := Op(k, near, op.microbatch)) in rank_of), None)

    while any(at[rank] < len(schedule.items[rank]) for rank in range(schedule.ranks)):
        for rank in range(schedule.ranks):
            while at[rank] < len(schedule.items[rank]):
                item = schedule.items[rank][at[rank]]
                sources = [(op, s) for op in parts(item) if (s := source(op)) is not None]
                if not all(s in done for _, s in sources):
                    break
                start = max([free[rank], *(done[s][1] + (costs.hop[op.microbatch] if rank_of[s] != rank else 0.0)
                                           for op, s in sources)])
                seconds = 0.0
                for op in parts(item):
                    f, i, w = (t[op.stage, op.microbatch] for t in (costs.forward, costs.input_grad, costs.weight_grad))
                    seconds += {"F": f, "I": i, "W": w, "B": i + w}[op.kind]
                    seconds -= costs.hidden[op.stage, op.microbatch] if isinstance(item, Pair) else 0.0
                free[rank] = start + seconds
                done.update((op, (start, free[rank])) for op in parts(item))
                at[rank] += 1
    return done


def random_costs(stages: int, microbatches: int, seed: int) -> Costs:
    draw = np.random.default_rng(seed)
    tables = [draw.uniform(0.5, 2.0, (stages, microbatches)) for _ in range(3)]
    return Costs(*tables, draw.uniform(0, 0.5, (stages, microbatches)), draw.uniform(0, 1, microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_a_plain_walk_with_unequal_everything(name: str):
    for ranks, microbatches, chunks in [(2, 5, 2), (4, 8, 2), (4, 11, 2), (4, 8, 3)]:
        if name != "interleaved":
            chunks = SCHEDULES[name].chunks
        schedule = SCHEDULES[name].generate(ranks, microbatches, chunks)
        costs = random_costs(schedule.stages, microbatches, seed=ranks)
        line, expected = simulate(schedule, costs), walked(schedule, costs)
        for rank, items in enumerate(schedule.items):
            for item, start, end in zip(items, line.start[rank], line.end[rank], strict=True):
                assert (start, end) == pytest.approx(expected[parts(item)[0]], rel=1e-12)


def test_orders_priced_together_equal_orders_priced_alone():
    schedule = SCHEDULES["dualpipev"].generate(4, 9, 2)
    costs, draw = random_costs(8, 9, seed=1), np.random.default_rng(2)
    orders = np.stack([draw.permutation(9) for _ in range(7)])
    together = Simulator(schedule).makespans(costs, orders)
    assert together.tolist() == [simulate(schedule, costs.reordered(order)).makespan for order in orders]
    assert len(set(together.tolist())) > 1


def test_forward_only_schedules():
    line = simulate(SCHEDULES["1f1b"].generate(3, 4, 1).forward_only(), Costs.scaled(3, np.ones(4), hop=0.5))
    assert line.makespan == 4 + 2 * 1.5


def test_what_cannot_run_is_refused():
    schedule = SCHEDULES["1f1b"].generate(2, 3, 1)
    F0, B0, F1, B1 = (Op(kind, 0, m) for m in range(2) for kind in "FB")
    f0, b0, f1, b1 = (Op(kind, 1, m) for m in range(2) for kind in "FB")
    # rank 1 begins with micro-batch 1, which rank 0 makes only after the gradient of micro-batch 0
    crossed = Schedule("crossed", 2, placement("looped", 2), ((F0, B0, F1, B1), (f1, b1, f0, b0)))
    with pytest.raises(ValueError, match=r"rank 0 never comes to B\(stage 0, micro-batch 0\): the schedule is cyclic"):
        Simulator(crossed)
    with pytest.raises(ValueError, match=r"needs the forward of stage 0: it is missing"):
        Simulator(replace(schedule, items=(schedule.items[0][1:], schedule.items[1])))
    with pytest.raises(ValueError, match="costs are for"):
        simulate(schedule, Costs.scaled(2, np.ones(4)))
    with pytest.raises(ValueError, match="hidden|hide"):
        Costs.scaled(2, np.ones(3), hidden=2.0)
    with pytest.raises(ValueError, match="negative or infinite"):
        Costs.scaled(2, [1.0, np.nan])
