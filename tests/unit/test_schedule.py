"""Generators and lowering: published orders, peaks and bubbles, and exchanges that cannot hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megarl.pipeline.check import ScheduleError, check, check_steps
from megarl.pipeline.generators import (
    SCHEDULES,
    dualpipe,
    dualpipev,
    fitting,
    gpipe,
    interleaved,
    mirrored_zb_v,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from megarl.pipeline.schedule import Op, Pair, Schedule, Step, Wiring, lower, parts, placement


def text(schedule: Schedule) -> list[str]:
    """Each rank's list in words: kind, micro-batch, and a for its first stage, b for its second."""
    def word(rank: int, op: Op) -> str:
        stages = schedule.stages_of(rank)
        return f"{op.kind}{op.microbatch}" + ("abc"[stages.index(op.stage)] if len(stages) > 1 else "")

    return [" ".join("&".join(word(rank, op) for op in parts(item)) for item in items)
            for rank, items in enumerate(schedule.items)]


def test_orders_with_one_stage_a_rank():
    # Narayanan et al. 2021, figure 4 (top), four stages, with five micro-batches here
    assert text(one_f_one_b(4, 5)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4", "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"]
    assert text(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert text(one_f_one_b(1, 2)) == ["F0 B0 F1 B1"]
    # Qi et al. 2024, figure 2 (left), with three stages and four micro-batches: W lags by 0, 1, 2
    assert text(zb_h1(3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"]


def test_order_of_interleaved():
    # Narayanan et al. 2021, section 2.2, two ranks, two stages each: rank 0 runs 2 + 2 forwards ahead, rank 1 runs 2
    assert text(interleaved(2, 4, 2)) == [
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a",
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"]
    # micro-batch 3 is a hole
    assert text(interleaved(2, 3, 2)) == [
        "F0a F1a F0b F1b F2a B0b B1b F2b B0a B1a B2b B2a", "F0a F1a F0b B0b F1b B1b F2a B0a B1a F2b B2b B2a"]


def test_order_of_zb_v():
    # Qi et al. 2024 (ZB-V): 3 and 1 forwards; the second stage joins; three operations of each stage in turn; the rest
    assert text(zb_v(2, 4)) == [
        "F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a",
        "F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a"]
    assert text(zb_v(1, 2)) == ["F0a F0b I0b W0b F1a I0a W0a F1b I1b W1b I1a W1a"]


def test_orders_of_the_dual_schedules():
    # the eight phases of DeepSeek's repository, one after the other
    assert text(dualpipev(2, 4)) == [
        "F0a F1a F2a F0b I0b W0b F1b F3a&B1b F2b&B0a B2b F3b&B1a B3b I2a W2a I3a W3a",
        "F0a F0b F1a F1b F2a B0b F2b&B0a F3a&B1b F3b&B1a B2b B2a I3b I3a W3b W3a"]
    assert text(dualpipe(2, 4)) == ["F0a F2b F1a B2b F3b&B0a B3b I1a W1a", "F2a F0b F3a B0b F1b&B2a B1b I3a W3a"]
    # the sixth micro-batch is a hole
    assert text(dualpipe(2, 5)) == ["F0a F3b F1a B3b F4b&B0a F2a&B4b B1a I2a W2a",
                                    "F3a F0b F4a B0b F1b&B3a B1b F2b&B4a B2b"]


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (6, 14), (8, 20)])
def test_dualpipe_is_two_mirrored_dualpipev(ranks: int, microbatches: int):
    half = microbatches // 2
    v, dual = dualpipev(ranks // 2, half), dualpipe(ranks, microbatches)

    def turned(op: Op, first_stages: bool) -> Op:
        """The operation of the V, which its first half of stages runs for micro-batches from this rank's end."""
        from_here = (op.stage < ranks // 2) == first_stages
        return replace(op, microbatch=op.microbatch + (0 if from_here else half))

    for rank in range(ranks // 2):
        for side, there in ((True, rank), (False, ranks - 1 - rank)):
            assert [tuple(turned(op, side) for op in parts(item)) for item in v.items[rank]] == (
                [parts(item) for item in dual.items[there]])


def test_mirrored_zb_v_is_two_zb_v():
    mirrored = mirrored_zb_v(4, 5)
    assert mirrored.placement == placement("mirrored", 4)
    assert mirrored.items[:2] == zb_v(2, 3).items
    assert text(mirrored)[3:1:-1] == [words.replace("1", "4").replace("0", "3") for words in text(zb_v(2, 2))]
    assert mirrored_zb_v(4, 1).items[2:] == ((), ())


def timed(schedule: Schedule) -> tuple[int, int]:
    """Makespan - work of the busiest rank, and the longest idle time between a rank's items, at F = I = W = 1."""
    wiring, at = Wiring(schedule), [0] * schedule.ranks
    ends: dict[Op, int] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in at]
    while any(at[rank] < len(items) for rank, items in enumerate(schedule.items)):
        for rank, items in enumerate(schedule.items):
            if at[rank] == len(items):
                continue
            ops = parts(items[at[rank]])
            givers = [giver for op in ops if (giver := wiring.needs(op))]
            if all(giver in ends for giver in givers):
                start = max([ends[giver] for giver in givers] + [end for _, end in spans[rank][-1:]], default=0)
                end = start + sum(2 if op.kind == "B" else 1 for op in ops)
                spans[rank].append((start, end))
                ends.update((op, end) for op in ops)
                at[rank] += 1
    busy = [sum(end - start for start, end in rank_spans) for rank_spans in spans]
    idle = [rank_spans[-1][1] - rank_spans[0][0] - work for rank_spans, work in zip(spans, busy, strict=True)]
    return max(ends.values()) - max(busy), max(idle)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_peaks_and_bubbles(ranks: int):
    """Published formulas, in activations and operations of one stage (a P-th of the model, of a V the half of it)."""
    last = ranks - 1
    for many in (2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
        assert check(gpipe(ranks, many)).peak_live == (many,) * ranks
        assert check(one_f_one_b(ranks, many)).peak_live == tuple(ranks - rank for rank in range(ranks))
        assert check(zb_h1(ranks, many)).peak_live == (ranks,) * ranks
        assert check(zb_v(ranks, many)).peak_live == (2 * ranks,) * ranks
        assert check(zb_v(ranks, many)).peak == (ranks,) * ranks
        assert check(dualpipev(ranks, many)).peak_live == (2 * ranks + 1,) * ranks
        assert check(dualpipev(ranks, many)).peak == (ranks + 1 / 2,) * ranks
        assert timed(gpipe(ranks, many)) == timed(one_f_one_b(ranks, many)) == (3 * last, 3 * last)
        assert timed(zb_h1(ranks, many)) == (last, last)
        assert timed(zb_v(ranks, many)) == timed(zb_v(ranks, 2 * ranks - 1)) == (last, 0)
        assert timed(dualpipev(ranks, many)) == (2 * last, 2 * last)
        if ranks % 2 == 0:
            even = many + many % 2
            assert check(dualpipe(ranks, even)).peak_live == check(dualpipe(ranks, even)).peak == (ranks + 1,) * ranks
            assert max(check(dualpipe(ranks, many)).peak_live) == ranks + 1
            assert timed(dualpipe(ranks, even)) == (ranks - 2, ranks - 2)
            assert max(check(mirrored_zb_v(ranks, many)).peak_live) == ranks
    for chunks in (2, 3):
        for groups in (2, 3):
            report = check(interleaved(ranks, groups * ranks, chunks))
            assert report.peak_live == tuple(ranks * chunks + ranks - 1 - 2 * rank for rank in range(ranks))
            assert max(report.peak) == pytest.approx(ranks + (ranks - 1) / chunks)
            assert timed(interleaved(ranks, groups * ranks, chunks)) == (3 * last, 3 * last)


def generated(ranks: int, microbatches: int) -> list[Schedule]:
    """What every family generates for these numbers, where there is no obstacle."""
    return [schedule for family in SCHEDULES.values() for chunks in range(family.chunks, family.chunks + 2)
            if (chunks == family.chunks or family.name == "interleaved")
            for one in (family, family.fallback) if one and not one.obstacle(ranks, microbatches)
            for schedule in [one.generate(ranks, microbatches, chunks)]]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_all_numbers_of_microbatches(ranks: int):
    for microbatches in sorted({1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1}):
        schedules = generated(ranks, microbatches)
        names = ["gpipe", "1f1b", "interleaved", "interleaved", "zb-h1", "zb-v"]  # whatever the numbers
        names += ["dualpipev"] * (microbatches >= 2 * ranks) + ["zb-v"]
        if ranks % 2 == 0:
            names += ["dualpipe"] * (microbatches >= 2 * ranks) + ["mirrored-zb-v"]
        assert [schedule.name for schedule in schedules] == names
        for schedule in schedules:
            report = check(schedule)  # complete, placed, ordered, free of deadlock
            most = {"gpipe": microbatches, "interleaved": ranks + (ranks - 1) / (schedule.stages // ranks),
                    "dualpipev": ranks + 1 / 2, "dualpipe": ranks + 1}.get(schedule.name, ranks)
            assert schedule.microbatches == microbatches and max(report.peak) <= most
            forward = schedule.forward_only()
            check(forward)
            assert forward.is_forward_only and not schedule.is_forward_only
            assert [op for rank in range(ranks) for op in schedule.ops(rank) if op.kind == "F"] == (
                [op for items in forward.items for op in items])


def test_lowering_by_hand():
    # rank 0: F0 0-1, F1 1-2, B0 4-6, F2 6-7, B1 7-9, B2 10-12;  rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7, F2 7-8, B2 8-10
    words = [[f"{'+'.join('s' + w(t) for t in step.sends)} {'+'.join('r' + w(t) for t in step.receives)} {step.item}"
              for step in steps] for steps in lower(one_f_one_b(2, 3))]
    assert words[0] == ["  " + f(0, 0), "sF0  " + f(0, 1), "sF1 rB0 " + b(0, 0), "  " + f(0, 2), "sF2 rB1 " + b(0, 1),
                        " rB2 " + b(0, 2), "  None"]
    # the activation of micro-batch 1 is made while rank 1 computes F0, and is received before it is needed
    assert words[1] == [" rF0 " + f(1, 0), " rF1 " + b(1, 0), "sB0  " + f(1, 1), "  " + b(1, 1), "sB1 rF2 " + f(1, 2),
                        "  " + b(1, 2), "sB2  None"]


def w(transfer) -> str:
    return f"{transfer.op.kind}{transfer.op.microbatch}"


def f(stage: int, microbatch: int) -> str:
    return str(Op("F", stage, microbatch))


def b(stage: int, microbatch: int) -> str:
    return str(Op("B", stage, microbatch))


@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 5), (4, 8), (4, 9), (5, 11)])
def test_lowered_exchanges(ranks: int, microbatches: int):
    """Sent right after it was made, received no later than needed, each once; nothing between stages of one rank."""
    for schedule in generated(ranks, microbatches):
        wiring, steps = Wiring(schedule), lower(schedule)
        sent, received = Counter(), Counter()
        for rank, rank_steps in enumerate(steps):
            assert tuple(step.item for step in rank_steps) == (*schedule.items[rank], None)
            for before, step in zip(rank_steps, rank_steps[1:], strict=False):
                assert set(step.sends) == set(wiring.sends(before.item))
            arrived = set()
            for step in rank_steps:
                sent.update(step.sends)
                received.update(step.receives)
                arrived.update(step.receives)
                assert step.item is None or arrived >= set(wiring.receives(step.item))
        assert sent == received and all(t.source != t.target for t in sent) and max(sent.values(), default=1) == 1
        turns = schedule.name in ("zb-v", "dualpipev", "mirrored-zb-v")  # in the middle of a V, without a transfer
        assert sum(sent.values()) == (2 * microbatches * (schedule.stages - 1 - turns) if ranks > 1 else 0)


def just_in_time(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The naive lowering: received right before it is needed."""
    wiring, lowered = Wiring(schedule), []
    for items in schedule.items:
        sends = [()] + [tuple(wiring.sends(item)) for item in items]
        receives = [tuple(wiring.receives(item)) for item in items] + [()]
        lowered.append(tuple(map(Step, sends, receives, (*items, None))))
    return tuple(lowered)


@pytest.mark.parametrize("schedule", [interleaved(2, 4, 2), zb_v(2, 3), dualpipev(2, 4), dualpipe(2, 4)],
                         ids=lambda schedule: schedule.name)
def test_receiving_just_in_time_would_hang(schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ScheduleError, match="deadlock if sends block until received: rank 0 waits to"):
        check_steps(just_in_time(schedule))
    check_steps(lower(schedule))
    check(schedule)
    monkeypatch.setattr("megarl.pipeline.check.lower", just_in_time)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(schedule)


def test_obstacles_and_fallbacks():
    assert SCHEDULES["dualpipe"].obstacle(3, 12) == "dualpipe needs an even number of ranks, not 3"
    assert SCHEDULES["dualpipe"].obstacle(4, 7) == "dualpipe needs at least 2P = 8 micro-batches, there are 7"
    assert SCHEDULES["dualpipev"].obstacle(4, 5) == "dualpipev needs at least 2P = 8 micro-batches, there are 5"
    assert SCHEDULES["1f1b"].obstacle(4, 0) == "1f1b needs at least 1 micro-batches, there are 0"
    assert all(SCHEDULES[name].obstacle(3, 1) == "" for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"))
    with pytest.raises(ValueError, match="dualpipe needs an even number of ranks, not 3"):
        fitting("dualpipe", 3, 12, 2)
    with pytest.raises(ValueError, match="dualpipev needs at least 2P = 8"):
        SCHEDULES["dualpipev"].generate(4, 7, 2)
    with pytest.raises(ValueError, match="interleaved needs at least 2 stages on each rank, not 1"):
        fitting("interleaved", 2, 4, 1)
    with pytest.raises(ValueError, match="zb-v has 2 stages on each rank, not 3"):
        fitting("zb-v", 2, 4, 3)

    assert fitting("dualpipev", 4, 8, 2) == (dualpipev(4, 8), "")
    assert fitting("dualpipev", 4, 7, 2) == (zb_v(4, 7), "dualpipev needs at least 2P = 8 micro-batches, there are 7; "
                                                         "zb-v takes its place")
    schedule, reason = fitting("dualpipe", 4, 3, 2)
    assert schedule == mirrored_zb_v(4, 3) and reason.endswith("there are 3; mirrored-zb-v takes its place")
    assert fitting("zb-h1", 1, 3, 1) == (one_f_one_b(1, 3), "one rank has one stage")
    assert fitting("gpipe", 1, 3, 1) == (gpipe(1, 3), "")


def test_families_say_what_they_are():
    for name, family in SCHEDULES.items():
        schedule = family.generate(4, 8, family.chunks)
        assert (schedule.name, schedule.placement) == (name, placement(family.placement, 4, family.chunks))
        assert family.splits == any(op.kind == "W" for rank in range(4) for op in schedule.ops(rank))
        assert family.pairs == any(isinstance(item, Pair) for items in schedule.items for item in items)
        assert schedule.copies == (2 if family.placement == "mirrored" else 1)
        few, _ = fitting(name, 4, 1, family.chunks)
        assert few.placement == schedule.placement
