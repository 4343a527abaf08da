"""Sets of engines as they come and go, and the order in which stages send to them."""

from __future__ import annotations

import itertools

import pytest

from megarl.rollout.fleet import EngineRecord
from megarl.sync.sets import EngineSet, assign, rounds


def engines(*names: str) -> list[EngineRecord]:
    """`a2` is engine a in its second life."""
    return [EngineRecord(name[0], int(name[1:] or 1), f"http://{name}", "up") for name in names]


def members(sets: list[EngineSet]) -> dict[int, list[str]]:
    return {one.number: [engine.id for engine in one.engines] for one in sets}


def test_only_sets_that_change_are_made_anew():
    first = assign([], engines(*"abcde"), 2, 1)
    assert members(first) == {1: ["a", "b"], 2: ["c", "d"], 3: ["e"]}
    assert assign(first, engines(*"edcba"), 2, 4) == first
    without = assign(first, engines("a", "b", "c", "e"), 2, 4)
    assert members(without) == {1: ["a", "b"], 4: ["c"], 3: ["e"]}
    # d in its second life: its own old set had to change, so it goes there and e is left alone
    back = assign(first, engines("a", "b", "c", "d2", "e"), 2, 4)
    assert members(back) == {1: ["a", "b"], 4: ["c", "d"], 3: ["e"]} and back[1].engines[1].incarnation == 2
    assert members(assign(first, engines("f", "e", "a", "b", "c", "d"), 2, 4)) == {
        1: ["a", "b"], 2: ["c", "d"], 4: ["e", "f"]}
    assert members(assign(first, engines("f"), 2, 4)) == {4: ["f"]} and assign(first, [], 2, 4) == []


@pytest.mark.parametrize(("stages", "sets"), list(itertools.product(range(1, 6), range(6))))
def test_every_stage_meets_every_set_and_no_set_has_two_sources(stages: int, sets: int):
    plan = rounds(stages, range(sets))
    assert len(plan) == stages and all(len(row) == stages for row in plan)
    for row in plan:
        served = sum(row, [])
        assert len(set(served)) == len(served)
        assert sum(map(bool, row)) == min(stages, sets)  # as many sources are busy as there can be
    assert sorted((stage, one) for row in plan for stage, found in enumerate(row) for one in found) == list(
        itertools.product(range(stages), range(sets)))
