"""Files of measured steps: there and back, what they are worth to the simulator, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.errors import UserMistake
from megarl.pipeline import trace
from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.schedule import Op, Pair
from megarl.pipeline.simulate import Costs, Timeline, simulate
from megarl.pipeline.trace import Span


def step(name: str = "dualpipev", hop: float = 0.25, seed: int = 0) -> Timeline:
    schedule = SCHEDULES[name].generate(4, 9, SCHEDULES[name].chunks)
    draw = np.random.default_rng(seed)
    tables = [draw.uniform(0.5, 2.0, (schedule.stages, 9)) for _ in range(3)]
    return simulate(schedule, Costs(*tables, draw.uniform(0, 0.5, (schedule.stages, 9)), np.full(9, hop)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_and_back(tmp_path: Path, name: str):
    line = step(name)
    rows = trace.spans(line)
    trace.write(tmp_path / "step.jsonl", [rows[i] for i in np.random.default_rng(1).permutation(len(rows))])
    again = trace.read(tmp_path / "step.jsonl")
    assert again.schedule.items == line.schedule.items and again.schedule.placement == line.schedule.placement
    assert again.peak_live == line.peak_live and again.schedule.microbatches == 9
    for one, two in ((line.start, again.start), (line.end, again.end)):
        assert np.concatenate(two) == pytest.approx(np.concatenate(one), abs=1e-9)


def test_the_file_is_as_described(tmp_path: Path):
    rows = [Span(0, Op("F", 1, 2), 0.5, 1.25), Span(1, Pair(Op("F", 0, 3), Op("B", 2, 1)), 1.0, 2.0)]
    trace.write(tmp_path / "step.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()] == [
        {"rank": 0, "item": {"kind": "F", "stage": 1, "microbatch": 2}, "start": 0.5, "end": 1.25},
        {"rank": 1, "item": {"kind": "FB", "stage": 0, "microbatch": 3, "stage2": 2, "microbatch2": 1}, "start": 1.0,
         "end": 2.0}]


@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_costs_give_the_measured_step(name: str):
    """With the true hop the simulator repeats the step; without one it is sooner done."""
    line = step(name)
    again = simulate(line.schedule, trace.costs(line, hop=0.25))
    for rank in range(4):
        assert again.start[rank] == pytest.approx(line.start[rank], abs=1e-12)
        assert again.end[rank] == pytest.approx(line.end[rank], abs=1e-12)
    assert simulate(line.schedule, trace.costs(line)).makespan < line.makespan - 0.25


def test_chrome_trace():
    line = step()
    data = json.loads(trace.chrome({"predicted": line, "measured": line}))
    boxes = [event for event in data["traceEvents"] if event["ph"] == "X"]
    items = sum(map(len, line.schedule.items))
    assert len(boxes) == 2 * items and {event["pid"] for event in boxes} == {0, 1}
    last = max(event["ts"] + event["dur"] for event in boxes)
    assert last == pytest.approx(line.makespan * 1e6, abs=0.01)  # microseconds
    assert {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"} == {
        "predicted", "measured"}
    pairs = [event for event in boxes if event["cat"] == "F&B"]
    assert len(pairs) == 2 * sum(isinstance(item, Pair) for items in line.schedule.items for item in items) > 0
    args = pairs[0]["args"]
    assert pairs[0]["name"] == f"F&B {args['microbatch']}&{args['microbatch2']}"


ROW = {"rank": 0, "item": {"kind": "F", "stage": 0, "microbatch": 0}, "start": 0.0, "end": 1.0}


@pytest.mark.parametrize(("text", "said"), [
    ("", "there are no operations"),
    ("[]", "line 1: not a row of a trace: TypeError"),
    ("{", "line 1: not a row"),
    (json.dumps(ROW) + "\n" + json.dumps(ROW | {"item": {"kind": "X", "stage": 0, "microbatch": 0}}),
     "line 2: not a row of a trace: ValueError: unknown kind 'X'"),
    (json.dumps(ROW | {"rank": -1}), "integers from 0"),
    (json.dumps(ROW | {"item": {"kind": "F", "stage": True, "microbatch": 0}}), "integers from 0"),
    (json.dumps(ROW | {"item": {"kind": "FB", "stage": 0, "microbatch": 0}}), "KeyError: 'stage2'"),
    (json.dumps(ROW | {"end": -1.0}), "it starts at 0.0 and ends at -1.0"),
    (json.dumps(ROW) + "\n" + json.dumps(ROW | {"start": 2.0, "end": 3.0}), "F(stage 0, micro-batch 0) is there twice"),
    (json.dumps(ROW | {"rank": 10**9}), "1 operations are too few for 1000000001 ranks"),
    (json.dumps(ROW | {"item": {"kind": "F", "stage": 10**20, "microbatch": 0}}), "1 operations are too few"),
    (json.dumps(ROW) + "\n" + json.dumps(ROW | {"rank": 2, "item": {"kind": "F", "stage": 0, "microbatch": 1}}) + "\n" +
     json.dumps(ROW | {"rank": 2, "start": 2.0, "end": 3.0, "item": {"kind": "B", "stage": 0, "microbatch": 1}}),
     "rank 1 of 3 has no operation"),
    (json.dumps(ROW) + "\n" + json.dumps(ROW | {"item": {"kind": "B", "stage": 0, "microbatch": 0}, "start": 2.0,
                                                "end": 3.0}) + "\n" +
     json.dumps(ROW | {"item": {"kind": "F", "stage": 0, "microbatch": 1}, "start": 4.0, "end": 5.0}),
     "B(stage 0, micro-batch 1): it is missing"),
    (json.dumps(ROW | {"start": -2.0, "end": -1.0}), "it starts at -2.0"),
    (json.dumps(ROW) + "\n" + json.dumps(ROW | {"item": {"kind": "B", "stage": 0, "microbatch": 0}, "start": 0.5}),
     "rank 0 runs F(stage 0, micro-batch 0) and B(stage 0, micro-batch 0) at the same time"),
])
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "step.jsonl").write_text(text)
    with pytest.raises(UserMistake) as error:
        trace.read(tmp_path / "step.jsonl")
    assert said in str(error.value) and "step.jsonl" in str(error.value)
