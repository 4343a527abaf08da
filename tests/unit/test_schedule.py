"""Schedules and their checker: published orders and peaks, and wrong schedules refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.pipeline.check import ScheduleError, check
from megarl.pipeline.schedule import GENERATORS, Op, Schedule, gpipe, lower, one_f_one_b


def text(schedule: Schedule) -> list[str]:
    return [" ".join(f"{op.kind}{op.microbatch}" for op in ops) for ops in schedule.ops]


def test_published_orders():
    # Narayanan et al. 2021, figure 4 (top), four stages, with five micro-batches here
    assert text(one_f_one_b(4, 5)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4", "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"]
    assert text(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert text(one_f_one_b(1, 2)) == ["F0 B0 F1 B1"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_generators_pass_at_every_size(ranks: int):
    for microbatches in (1, 2, 3, ranks, ranks + 1, 3 * ranks):
        assert check(gpipe(ranks, microbatches)).peak_live == (microbatches,) * ranks
        expected = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert check(one_f_one_b(ranks, microbatches)).peak_live == expected
        for generate in GENERATORS.values():
            forward = generate(ranks, microbatches).forward_only()
            check(forward)
            assert text(forward) == [" ".join(f"F{m}" for m in range(microbatches))] * ranks


def test_lowering_pairs_the_steady_state_exchanges():
    steps = lower(one_f_one_b(2, 3))
    # rank 0 sends an activation and receives a gradient in one exchange, rank 1 the other way round
    steady = [step for step in steps[0] if step.op == Op("B", 0, 0)][0]
    assert [str(t) for t in steady.sends] == ["activation for F(stage 1, micro-batch 1) from rank 0 to rank 1"]
    assert [str(t) for t in steady.receives] == ["gradient for B(stage 0, micro-batch 0) from rank 1 to rank 0"]
    sent = sorted(str(t) for rank in steps for step in rank for t in step.sends)
    received = sorted(str(t) for rank in steps for step in rank for t in step.receives)
    assert sent == received and len(sent) == 2 * 3
    assert all(not step.sends and not step.receives for step in lower(one_f_one_b(1, 3))[0])


def edit(schedule: Schedule, rank: int, change) -> Schedule:
    ops = [list(rank_ops) for rank_ops in schedule.ops]
    change(ops[rank])
    return replace(schedule, ops=tuple(map(tuple, ops)))


def swap(first: int, second: int):
    def change(ops: list[Op]) -> None:
        ops[first], ops[second] = ops[second], ops[first]
    return change


def put(index: int, op: Op):
    def change(ops: list[Op]) -> None:
        ops[index] = op
    return change


def refused(schedule: Schedule, rank: int | None, op: Op | None, reason: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert (error.value.rank, error.value.op) == (rank, op), error.value
    assert reason in str(error.value)


def test_incomplete_or_misplaced():
    right = one_f_one_b(2, 3)
    refused(edit(right, 1, lambda ops: ops.pop()), 1, Op("B", 1, 2), "missing")
    refused(edit(right, 0, lambda ops: ops.append(ops[0])), 0, Op("F", 0, 0), "already on rank 0")
    refused(edit(right, 0, put(0, Op("F", 1, 0))), 0, Op("F", 1, 0), "placed on rank (1,)")
    refused(edit(right, 0, put(0, Op("F", 0, 3))), 0, Op("F", 0, 3), "only 2 stages and 3")
    refused(replace(right, ops=right.ops[::-1]), 0, Op("F", 1, 0), "placed")
    refused(replace(right, placement=((0,), (2,))), None, None, "stage 1 is placed on ranks [2] of 2")


def test_backward_before_forward_or_on_another_rank():
    refused(edit(one_f_one_b(2, 3), 1, swap(0, 1)), 1, Op("B", 1, 0), "its F comes later")
    mirrored = Schedule("mirrored", 1, ((0, 1),), ((Op("F", 0, 0),), (Op("B", 0, 0),)))
    refused(mirrored, 1, Op("B", 0, 0), "its F is on rank 0")


def test_a_mirrored_stage_may_share_its_microbatches():
    ops = tuple((Op("F", 0, m), Op("B", 0, m)) for m in (0, 1))
    assert check(Schedule("mirrored", 2, ((0, 1),), ops)).peak_live == (1, 1)


def test_a_v_turns_without_a_transfer():
    def f_then_b(order: list[int]) -> tuple[Op, ...]:
        return tuple(Op("F", s, 0) for s in order) + tuple(Op("B", s, 0) for s in order[::-1])

    steps = check(Schedule("v", 1, ((0,), (1,), (1,), (0,)), (f_then_b([0, 3]), f_then_b([1, 2])))).steps
    assert sum(len(step.sends) for rank in steps for step in rank) == 4  # 0 -> 1, 2 -> 3 and their gradients


def test_out_of_order_channel():
    # rank 1 takes micro-batch 1 first although rank 0 sends micro-batch 0 first
    refused(edit(gpipe(2, 2), 1, swap(0, 1)), 1, Op("F", 1, 1), "sends the one for micro-batch 0 first")


def test_cyclic():
    # rank 0 wants the gradient of 0 before it computes F1; rank 1 wants F1 before it computes B0
    cyclic = edit(gpipe(2, 2), 0, swap(1, 2))
    with pytest.raises(ScheduleError, match="cyclic: rank 0 waits for the gradient .* rank 1 waits for the activation"):
        check(cyclic)


def test_deadlock_only_if_sends_block():
    # Both ranks send before they receive: fine for buffered sends, stuck where a send waits for its receive.
    # Stage 1 of micro-batch 0 lives on rank 1, of micro-batch 1 on rank 0 (a mirrored pair of two stages).
    lanes = ((Op("F", 0, 0), Op("F", 0, 2), Op("F", 1, 1), Op("F", 1, 3)),
             (Op("F", 0, 1), Op("F", 0, 3), Op("F", 1, 0), Op("F", 1, 2)))
    stuck = Schedule("lanes", 4, ((0, 1), (0, 1)), lanes)
    with pytest.raises(ScheduleError, match="deadlock if sends block until received: rank 0 waits for the activation"):
        check(stuck)
    fine = ((lanes[0][0], lanes[0][2], lanes[0][1], lanes[0][3]), (lanes[1][0], lanes[1][2], lanes[1][1], lanes[1][3]))
    check(replace(stuck, ops=fine))


def _mutations(schedule: Schedule):
    for rank, ops in enumerate(schedule.ops):
        for index in range(len(ops)):
            yield edit(schedule, rank, lambda ops, index=index: ops.pop(index))
            yield edit(schedule, rank, lambda ops, index=index: ops.append(ops[index]))


def test_every_dropped_or_repeated_operation_is_refused():
    for generate in GENERATORS.values():
        for mutant in _mutations(generate(3, 4)):
            with pytest.raises(ScheduleError):
                check(mutant)
