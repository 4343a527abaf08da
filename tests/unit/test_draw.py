"""Pictures of timelines: well-formed, every operation once and at its place, numbers where they fit."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from megarl.pipeline import trace
from megarl.pipeline.choose import model_costs
from megarl.pipeline.draw import html, svg
from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.schedule import parts
from megarl.pipeline.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def line_of(name: str, ranks: int = 8, microbatches: int = 20) -> Timeline:
    schedule = SCHEDULES[name].generate(ranks, microbatches, SCHEDULES[name].chunks)
    return simulate(schedule, model_costs(ranks, schedule.stages, [1.0] * microbatches, (1, 1, 1)))


def boxes(text: str) -> list[tuple[str, float, float, float, float]]:
    """(class, x, y, width, height) of the operations, without the legend."""
    rects = ET.fromstring(text).iter(f"{SVG}rect")
    return [(r.get("class"), *(float(r.get(k)) for k in ("x", "y", "width", "height")))
            for r in rects if r.get("class") and float(r.get("y")) > 54]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_operation_is_drawn_at_its_place(name: str):
    line = line_of(name)
    found = boxes(svg({name: line}))
    assert len(found) == sum(len(line.schedule.ops(rank)) for rank in range(8))
    width = line.makespan / max(x + w - 66 for _, x, _, w, _ in found)  # time of a pixel
    rows = sorted({y for _, _, y, _, height in found if height == 26})
    assert len(rows) == 8
    drawn = sorted((rows.index(max(row for row in rows if row <= y)), round((x - 66) * width, 1),
                    round((x + w - 66) * width, 1), kind[0]) for kind, x, y, w, _ in found)
    expected = sorted((span.rank, round(span.start, 1), round(span.end, 1), op.kind)
                      for span in trace.spans(line) for op in parts(span.item))
    assert [one[0] for one in drawn] == [one[0] for one in expected]
    assert np.array([one[1:3] for one in drawn]) == pytest.approx(np.array([one[1:3] for one in expected]), abs=0.11)
    assert sorted(one[3] for one in drawn) == sorted(one[3] for one in expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_operation_has_its_number_at_8_ranks_and_20_microbatches(name: str):
    line = line_of(name)
    root = ET.fromstring(svg({name: line}))
    numbers = [t.text for t in root.iter(f"{SVG}text") if (t.get("class") or "").split()[:1] == ["n"]]
    expected = [str(op.microbatch) for rank in range(8) for op in line.schedule.ops(rank)]
    assert sorted(numbers) == sorted(expected)
    assert float(root.get("width")) < 2600


def test_facts_are_in_the_picture():
    text = svg({"dualpipe <1>": line_of("dualpipe")})
    words = " ".join(t.text for t in ET.fromstring(text).iter(f"{SVG}text"))
    for expected in ("dualpipe <1>", "8 ranks, 8 stages, 20 micro-batches, 2 parameter copies", "makespan 66",
                     "bubble 9.1 %", "peak memory 9 ", "F&B pair", "W weight gradient", "rank 7"):
        assert expected in words
    assert "pair" not in svg({"1f1b": line_of("1f1b")}) and "later ones" not in svg({"1f1b": line_of("1f1b")})


def test_two_timelines_share_one_axis():
    slow, fast = line_of("1f1b"), line_of("zb-h1")
    text = svg({"predicted": fast, "measured": slow}, unit="s")
    found = boxes(text)
    assert max(x + w for _, x, _, w, _ in found) < float(ET.fromstring(text).get("width")) - 100  # room for the numbers
    first = [(x, w) for kind, x, y, w, _ in found if kind == "F0" and x < 66.01]
    assert len(first) == 2 and first[0] == first[1]
    middle = np.median([y for _, _, y, _, _ in found])
    ends = [max(x + w for _, x, y, w, _ in found if (y > middle) == below) - 66 for below in (False, True)]
    assert ends[1] / ends[0] == pytest.approx(slow.makespan / fast.makespan, rel=1e-3)
    assert "time in s" in svg({"predicted": fast}, unit="s")


def test_html_needs_nothing_from_elsewhere():
    text = html({"a & b": line_of("zb-v")})
    assert "<title>a &amp; b</title>" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)
    assert re.findall("https?://[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]
    assert "<title>F(stage 0, micro-batch 0): 0 to 0.5</title>" in text


def test_nothing_measured_is_no_crash():
    assert "makespan 0" in svg({"none": simulate(line_of("1f1b", 2, 2).schedule, model_costs(2, 2, [0, 0], (1, 1, 1)))})
