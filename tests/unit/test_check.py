"""The checker of schedules: each kind of wrong schedule is refused with rank, operation and reason."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megarl.pipeline.check import ScheduleError, check, check_steps
from megarl.pipeline.generators import SCHEDULES, dualpipe, gpipe, one_f_one_b, zb_h1
from megarl.pipeline.schedule import Item, Op, Pair, Schedule, Step, Transfer, Wiring, parts


def edit(schedule: Schedule, rank: int, change) -> Schedule:
    items = [list(rank_items) for rank_items in schedule.items]
    change(items[rank])
    return replace(schedule, items=tuple(map(tuple, items)))


def swap(first: int, second: int):
    def change(items: list[Item]) -> None:
        items[first], items[second] = items[second], items[first]
    return change


def put(index: int, item: Item):
    def change(items: list[Item]) -> None:
        items[index] = item
    return change


def refused(schedule: Schedule, rank: int | None, item: Item | None, reason: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert (error.value.rank, error.value.item) == (rank, item), error.value
    assert reason in str(error.value)
    assert rank is None or f"rank {rank}: " in str(error.value)
    assert item is None or str(item) in str(error.value)


def test_incomplete_or_misplaced():
    right = one_f_one_b(2, 3)
    refused(edit(right, 1, lambda items: items.pop()), 1, Op("B", 1, 2), "missing")
    refused(edit(right, 0, lambda items: items.append(items[0])), 0, Op("F", 0, 0), "already on rank 0")
    refused(edit(right, 0, put(0, Op("F", 1, 0))), 0, Op("F", 1, 0), "placed on rank (1,)")
    refused(edit(right, 0, put(0, Op("F", 0, 3))), 0, Op("F", 0, 3), "only 2 stages and 3")
    refused(replace(right, items=right.items[::-1]), 0, Op("F", 1, 0), "placed")
    refused(replace(right, placement=((0,), (2,))), None, None, "stage 1 is placed on ranks [2] of 2")


def test_halves_of_a_backward():
    right = zb_h1(2, 2)  # rank 0: F0 F1 I0 W0 I1 W1
    refused(edit(right, 0, lambda items: items.pop()), 0, Op("W", 0, 1), "missing")
    refused(edit(right, 0, lambda items: items.pop(2)), 0, Op("I", 0, 0), "missing")
    refused(edit(right, 0, swap(2, 3)), 0, Op("W", 0, 0), "its I comes later")
    refused(edit(right, 0, put(3, Op("B", 0, 0))), 0, Op("I", 0, 0), "there is a full backward as well")
    refused(edit(right, 0, lambda items: items.insert(2, Op("B", 0, 0))), 0, Op("I", 0, 0), "full backward as well")
    refused(edit(right, 0, lambda items: items.insert(0, items.pop(2))), 0, Op("I", 0, 0), "its F comes later")

    def put_off(items: list[Item]) -> None:
        items.insert(4, items.pop(3))
    check(edit(right, 0, put_off))  # F0 F1 I0 I1 W0 W1
    refused(edit(edit(right, 0, put_off), 0, swap(4, 5)), 0, Op("W", 0, 1),
            "the W of a stage follow the order of its I: micro-batch 0 is first")
    mixed = Schedule("mixed", 2, ((0,),), (tuple(Op(kind, 0, m) for kind, m in (
        ("F", 0), ("F", 1), ("I", 0), ("B", 1), ("W", 0))),))
    refused(mixed, 0, Op("B", 0, 1), "micro-batch 0 still waits for its W in this stage")
    check(edit(mixed, 0, swap(3, 4)))


def test_backward_before_forward_or_on_another_rank():
    refused(edit(one_f_one_b(2, 3), 1, swap(0, 1)), 1, Op("B", 1, 0), "its F comes later")
    mirrored = Schedule("mirrored", 1, ((0, 1),), ((Op("F", 0, 0),), (Op("B", 0, 0),)))
    refused(mirrored, 1, Op("B", 0, 0), "its F is on rank 0")
    split = Schedule("mirrored", 1, ((0, 1),), ((Op("F", 0, 0), Op("I", 0, 0)), (Op("W", 0, 0),)))
    refused(split, 1, Op("W", 0, 0), "its F is on rank 0")


def test_a_mirrored_stage_may_share_its_microbatches():
    items = tuple((Op("F", 0, m), Op("B", 0, m)) for m in (0, 1))
    assert check(Schedule("mirrored", 2, ((0, 1),), items)).peak_live == (1, 1)


def test_order_of_two_stages_on_a_rank():
    def v(last: list[int]) -> Schedule:
        """One micro-batch through stages 0, 1 | 2, 3 of a V; `last`: the order of stages 1 and 2 on rank 1."""
        ends = tuple(Op("F", s, 0) for s in (0, 3)) + tuple(Op("B", s, 0) for s in (3, 0))
        turn = tuple(Op("F", s, 0) for s in last) + tuple(Op("B", s, 0) for s in last[::-1])
        return Schedule("v", 1, ((0,), (1,), (1,), (0,)), (ends, turn))

    steps = check(v([1, 2])).steps
    assert sum(len(step.sends) for rank in steps for step in rank) == 4  # 0 -> 1, 2 -> 3 and their gradients
    refused(v([2, 1]), 1, Op("F", 2, 0), "it needs F(stage 1, micro-batch 0), which comes later")
    refused(edit(v([1, 2]), 1, swap(2, 3)), 1, Op("B", 1, 0), "it needs B(stage 2, micro-batch 0), which comes later")


def test_pairs():
    right = dualpipe(2, 4)
    at = next(index for index, item in enumerate(right.items[0]) if isinstance(item, Pair))
    pair = right.items[0][at]
    check(edit(right, 0, lambda items: items.__setitem__(slice(at, at + 1), parts(pair))))
    swapped = Pair(pair.backward, pair.forward)
    refused(edit(right, 0, put(at, swapped)), 0, swapped, "a pair is a forward and a full backward, in this order")
    halved = Pair(pair.forward, replace(pair.backward, kind="I"))
    refused(edit(right, 0, put(at, halved)), 0, halved, "a forward and a full backward")
    same = Pair(Op("F", 0, 0), Op("B", 0, 0))
    refused(Schedule("pair", 1, ((0,),), ((same,),)), 0, same, "its backward needs its forward")


def test_a_pair_waits_for_both_inputs():
    # On rank 0, F1 & B0 wants B0 of rank 1, which comes after F1 there: apart they can run, together they cannot.
    lists = ((Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1)),
             (Op("F", 1, 0), Op("F", 1, 1), Op("B", 1, 0), Op("B", 1, 1)))
    check(Schedule("apart", 2, ((0,), (1,)), lists))
    paired = Schedule("paired", 2, ((0,), (1,)), ((lists[0][0], Pair(*lists[0][1:3]), lists[0][3]), lists[1]))
    refused(paired, 0, Pair(*lists[0][1:3]), "cyclic: rank 0 waits for the gradient for B(stage 0, micro-batch 0)")


def test_out_of_order_channel():
    # rank 1 takes micro-batch 1 first although rank 0 computes micro-batch 0 first
    refused(edit(gpipe(2, 2), 1, swap(0, 1)), 1, Op("F", 1, 1),
            "out of order in its channel: rank 0 sends the one for F(stage 1, micro-batch 0) first")


def test_cyclic():
    # rank 0 wants the gradient of 0 before it computes F1; rank 1 wants F1 before it computes B0
    refused(edit(gpipe(2, 2), 0, swap(1, 2)), 0, Op("B", 0, 0),
            "cyclic: rank 0 waits for the gradient for B(stage 0, micro-batch 0) from rank 1 to rank 0; rank 1 waits "
            "for the activation for F(stage 1, micro-batch 1) from rank 0 to rank 1")


def test_exchanges_that_hang_or_do_not_fit():
    there, back = Transfer(Op("F", 1, 0), 0, 1), Transfer(Op("F", 1, 1), 1, 0)
    # both ranks send before they receive: fine where sends are buffered
    hang = tuple((Step((out,), (), None), Step((), (into,), None)) for out, into in ((there, back), (back, there)))
    with pytest.raises(ScheduleError, match="rank 0: deadlock if sends block until received: rank 0 waits to send the "
                                            "activation .*; rank 1 waits to send the activation"):
        check_steps(hang)
    check_steps(((Step((there,), (back,), None),), (Step((back,), (there,), None),)))
    with pytest.raises(ScheduleError, match="rank 1: nobody sends the activation"):
        check_steps(((), (Step((), (there,), None),)))
    with pytest.raises(ScheduleError, match="rank 0 waits to send"):
        check_steps(((Step((there,), (), None),), ()))
    other = Transfer(Op("F", 1, 2), 0, 1)
    with pytest.raises(ScheduleError, match="rank 1: it is out of order in its channel"):
        check_steps(((Step((there, other), (), None),), (Step((), (other, there), None),)))


# Every generator's lists, changed in one place. What `check` lets pass has to compute the right thing.

SMALL = [family.generate(ranks, microbatches, family.chunks)
         for family in (*SCHEDULES.values(), SCHEDULES["dualpipe"].fallback)
         for ranks, microbatches in ((2, 4), (4, 3), (4, 8)) if not family.obstacle(ranks, microbatches)]


def neighbours_swapped(schedule: Schedule) -> Iterator[Schedule]:
    for rank, items in enumerate(schedule.items):
        for index in range(len(items) - 1):
            yield edit(schedule, rank, swap(index, index + 1))


def never_right(schedule: Schedule) -> Iterator[Schedule]:
    """An item dropped, repeated, moved to another rank, on another micro-batch or stage, or of another kind."""
    for rank, items in enumerate(schedule.items):
        for index, item in enumerate(items):
            without = edit(schedule, rank, lambda items, index=index: items.pop(index))
            yield without
            yield edit(schedule, rank, lambda items, index=index: items.insert(index, items[index]))
            other = (rank + 1) % schedule.ranks
            yield edit(without, other, lambda items, index=index, item=item: items.insert(index, item))
            yield edit(without, schedule.ranks - 1 - rank, lambda items, index=index, item=item:
                       items.insert(index, item))
            for op in parts(item):
                for wrong in (replace(op, microbatch=(op.microbatch + 1) % schedule.microbatches),
                              replace(op, microbatch=schedule.microbatches), replace(op, microbatch=-1),
                              replace(op, stage=(op.stage + 1) % schedule.stages),
                              *(replace(op, kind=kind) for kind in "FBIW" if kind != op.kind)):
                    new = [wrong if part == op else part for part in parts(item)]
                    yield edit(schedule, rank, put(index, Pair(*new) if len(new) == 2 else wrong))


def computed(schedule: Schedule, seed: int):
    """What the lists compute, run in a random order with a queue for each channel, or None where they get stuck.

    Values are symbols: an activation is (stage, micro-batch as read by the first stage, its input). A receive takes
    what comes first in its channel. A W takes what its stage put away first.
    """
    draw, wiring = random.Random(seed), Wiring(schedule)
    at, queues, stores = [0] * schedule.ranks, defaultdict(deque), defaultdict(deque)
    local, inputs = {}, {}
    gradients = defaultdict(list)

    def source(op: Op):
        giver = wiring.needs(op)
        if giver is None or wiring.home[giver] == wiring.home[op]:
            return None if giver is None else (local, op)
        return queues[wiring.home[giver], wiring.home[op], op.kind == "F"], 0

    def ready(op: Op) -> bool:
        if op.kind == "W":
            return bool(stores[op.stage, wiring.home[op]])
        if op.kind != "F" and (op.stage, op.microbatch) not in inputs:
            return False
        place = source(op)
        return place is None or (op in local if place[0] is local else bool(place[0]))

    def run(op: Op, rank: int) -> None:
        if op.kind == "W":
            gradients[op.stage].append(stores[op.stage, rank].popleft())
            return
        place = source(op)
        value = op.microbatch if place is None else local.pop(op) if place[0] is local else place[0].popleft()
        if op.kind == "F":
            inputs[op.stage, op.microbatch] = value
        else:
            done = inputs.pop((op.stage, op.microbatch)), value
            (gradients[op.stage] if op.kind == "B" else stores[op.stage, rank]).append(done)
        taker = wiring.feeds(op)
        if taker and wiring.home[taker] == rank:
            local[taker] = op.kind != "F", op.stage, value
        elif taker:
            queues[rank, wiring.home[taker], taker.kind == "F"].append((op.kind != "F", op.stage, value))

    while waiting := [rank for rank, items in enumerate(schedule.items) if at[rank] < len(items)]:
        able = [rank for rank in waiting if all(ready(op) for op in parts(schedule.items[rank][at[rank]]))]
        if not able:
            return None
        rank = draw.choice(able)
        for op in parts(schedule.items[rank][at[rank]]):
            run(op, rank)
        at[rank] += 1
    left = any(queues.values()) or any(stores.values()) or local or inputs
    return None if left else {stage: sorted(values, key=repr) for stage, values in gradients.items()}


def expected(schedule: Schedule):
    """The gradients of every stage, one micro-batch after the other in a single process."""
    gradients = defaultdict(list)
    for m in range(schedule.microbatches):
        value, inputs = m, []
        for stage in range(schedule.stages):
            inputs.append(value)
            value = False, stage, value
        value = m
        for stage in reversed(range(schedule.stages)):
            gradients[stage].append((inputs[stage], value))
            value = True, stage, value
    return {stage: sorted(values, key=repr) for stage, values in gradients.items()}


def refusal(schedule: Schedule) -> str:
    """Why a schedule is refused; "" if it passes."""
    try:
        check(schedule)
    except ScheduleError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.ranks}-{s.microbatches}")
def test_changed_lists(schedule: Schedule):
    want = expected(schedule)
    assert not refusal(schedule) and computed(schedule, 0) == computed(schedule, 1) == want
    for mutant in never_right(schedule):
        assert mutant.items == schedule.items or refusal(mutant)  # a move to the same place changes nothing
    passed = refused_ones = 0
    for mutant in neighbours_swapped(schedule):
        if reason := refusal(mutant):
            refused_ones += 1
            # right all the same only where a queue of weight gradients would be mixed up
            assert computed(mutant, 2) != want or "order of its I" in reason or "waits for its W" in reason
        else:
            passed += 1
            assert computed(mutant, 2) == want
    assert passed and refused_ones
