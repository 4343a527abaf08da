"""Arranging optimizer steps: schedules, fallbacks told once, orders, costs that are measured once and kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest

from megarl.config.layout import Layout
from megarl.data.packing import plan_packs
from megarl.model.hf_config import HFConfig
from megarl.pipeline.generators import SCHEDULES, fitting
from megarl.pipeline.simulate import simulate
from megarl.pipeline.trace import Span
from megarl.update import pace as pace_module
from megarl.update.pace import Pace


def make(folder: Path, schedule: str, placement: str = "looped", chunks: int = 1, pipeline: int = 2, **keys: Any
         ) -> Pace:
    models.hf_config("qwen3_moe", num_hidden_layers=8).save_pretrained(folder)
    config = models.config_for(folder).model_copy(update={"pipeline": models.config_for(folder).pipeline.model_copy(
        update={"schedule": schedule, **keys})})
    groups = SimpleNamespace(layout=Layout(pipeline, pipeline=pipeline, placement=placement, chunks=chunks), tp=0, cp=0,
                             dp=0)
    return Pace(config, HFConfig.read(folder), groups)


def packs(lengths: list[int]) -> Any:
    """A micro-batch for each length, in this order."""
    plan = plan_packs(lengths, ranks=1, max_tokens=max(lengths))
    first = {one[0]: slot for slot, one in enumerate(plan.bins[0])}
    assert len(first) == len(lengths)
    return plan.reordered([first[sample] for sample in range(len(lengths))])


LENGTHS = [70, 100, 60, 90, 99, 65, 80, 75]


def test_one_rank_changes_nothing(tmp_path: Path):
    plan = packs(LENGTHS)
    assert make(tmp_path, "auto", pipeline=1).arrange(plan) == ("1f1b", plan, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_no_slower_and_the_bubble_is_the_simulated_one(name: str, tmp_path: Path):
    family, plan = SCHEDULES[name], packs(LENGTHS)
    pace = make(tmp_path, name, family.placement, family.chunks)
    schedule, arranged, bubble = pace.arrange(plan)
    assert schedule == name and not pace.news()
    assert sorted(map(tuple, arranged.bins[0])) == sorted(map(tuple, plan.bins[0]))
    assert [int(cost) for cost in arranged.cost[0]] == [int(plan.cost[0][plan.bins[0].index(one)]) for one in
                                                        arranged.bins[0]]
    made, _ = fitting(name, 2, len(LENGTHS), family.chunks)

    def priced(of: Any) -> Any:
        return simulate(made, pace._costs.costs(of.cost.max(axis=0)))

    assert bubble == pytest.approx(priced(arranged).bubble_fraction)
    assert priced(arranged).makespan <= priced(plan).makespan * (1 + 1e-12)
    assert make(tmp_path, name, family.placement, family.chunks, reorder=False).arrange(plan)[1].bins == plan.bins


def test_a_fallback_is_told_once(tmp_path: Path):
    pace = make(tmp_path, "dualpipev", "v", 2)
    assert pace.arrange(packs(LENGTHS[:3])).schedule == "dualpipev"
    assert pace.news() == ["dualpipev needs at least 2P = 4 micro-batches, there are 3; zb-v takes its place"]
    pace.arrange(packs(LENGTHS[:3]))
    assert pace.news() == []


@pytest.mark.parametrize(("minibatches", "epochs", "expected"), [
    (1, 1, ["zb-v", "zb-v", "dualpipev", "zb-v"]), (2, 1, ["zb-v", "zb-v", "dualpipev", "dualpipev"]),
    (4, 1, ["zb-v", "zb-v", "dualpipev", "dualpipev"]), (1, 4, ["zb-v"] * 4 + ["dualpipev"]),
])
def test_costs_are_measured_once_shared_and_kept(minibatches: int, epochs: int, expected: list[str], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch):
    """Updates whose operations take known times; the first one, ten times as slow, does not count."""
    monkeypatch.setattr(pace_module.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(pace_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(pace_module.dist, "all_gather_object", lambda out, mine: out.__setitem__(0, mine))
    monkeypatch.setattr(pace_module.dist, "broadcast_object_list", lambda values, src: None)
    pace, plan = make(tmp_path, "auto", "v", 2), packs(LENGTHS)
    names: list[str] = []
    while not pace.state():
        arranged = [pace.arrange(plan, number) for number in range(minibatches)]
        for name, ordered, _ in arranged * epochs:
            if pace.state():
                break
            assert pace.is_timing == bool(names)
            schedule, _ = fitting(name, 2, len(LENGTHS), 2)
            line = simulate(schedule, _costs(ordered.cost.max(axis=0) * (1 if names else 10)))
            pace.learn([Span(rank, item, float(start), float(end)) for rank, items in enumerate(schedule.items) for
                        item, start, end in zip(items, line.start[rank], line.end[rank], strict=True)], name, ordered)
            names.append(name)
    assert names == expected and not pace.is_timing
    learnt, known = pace._costs.costs(plan.cost.max(axis=0)), _costs(plan.cost.max(axis=0))
    for part in ("forward", "input_grad", "weight_grad", "hidden"):
        np.testing.assert_allclose(getattr(learnt, part), getattr(known, part), rtol=1e-6, atol=1e-12)
    resumed = make(tmp_path, "auto", "v", 2)
    resumed.resume(pace.state())
    assert resumed.state() == pace.state()
    assert not resumed.is_timing and resumed.arrange(plan).schedule == pace.arrange(plan).schedule == "dualpipev"
    assert resumed.arrange(plan).plan.bins == pace.arrange(plan).plan.bins
    other_stages = make(tmp_path, "auto", "v", 2)
    other_stages.resume(pace.state() | {"layers.1": 1})
    assert other_stages.state() == {}


def _costs(cost: np.ndarray) -> Any:
    """F and I mostly communication, which a pair hides."""
    from megarl.pipeline.simulate import Costs

    return Costs.scaled(4, cost * 1e-5, forward=2.0, input_grad=2.0, weight_grad=0.5, hidden=1.6)
