"""Fitted costs: exact where the measurements are exact, sensible where they are few, equal wherever they are sent."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megarl.pipeline.cost_model import CostModel, Line, Measured, measured
from megarl.pipeline.generators import SCHEDULES
from megarl.pipeline.simulate import simulate
from megarl.pipeline.trace import spans

TRUE = CostModel(tuple(Line(0.01 * s, 1e-6 * (s + 1)) for s in range(8)), tuple(Line(0.02, 2e-6) for _ in range(8)),
                 tuple(Line(0.005 * s, 1.5e-6) for s in range(8)), hidden=0.25, hop=0.003, hop_per_token=1e-6)
SLOTS = np.array([50_000, 41_000, 37_000, 30_000, 22_000, 17_000, 9_000, 4_000, 1_000])
TOKENS = np.array([900, 800, 700, 600, 500, 400, 300, 200, 100])


def same(one: CostModel, two: CostModel, rel: float = 1e-8) -> None:
    assert one.to_dict().keys() == two.to_dict().keys()
    assert list(one.to_dict().values()) == pytest.approx(list(two.to_dict().values()), rel=rel, abs=1e-12)


def test_costs_follow_the_lines():
    costs = TRUE.costs(SLOTS, TOKENS)
    assert costs.forward[2, 3] == pytest.approx(0.02 + 3e-6 * 30_000)
    assert costs.input_grad[5, 8] == pytest.approx(0.02 + 2e-3) and costs.weight_grad[1, 0] == pytest.approx(0.08)
    assert costs.hidden[0, 0] == pytest.approx(0.25 * 0.05) and costs.hidden[7, 0] == pytest.approx(0.25 * 0.12)
    assert costs.hop.tolist() == pytest.approx((0.003 + 1e-6 * TOKENS).tolist())
    with pytest.raises(ValueError, match="give the tokens"):
        TRUE.costs(SLOTS)


def test_a_traced_step_gives_the_true_model_back():
    """DualPipeV: forwards, full and split backwards and pairs, all in one step."""
    line = simulate(SCHEDULES["dualpipev"].generate(4, 9, 2), TRUE.costs(SLOTS, TOKENS))
    rows = measured(spans(line), SLOTS)
    assert {row.kind for row in rows} == {"F", "B", "I", "W", "FB"}
    same(CostModel.fit(8, rows, hop=0.003, hop_per_token=1e-6), TRUE)


def test_b_alone_is_divided_equally_and_noise_averages_out():
    draw = np.random.default_rng(0)
    rows = [Measured("F", 0, cost, 0.1 + 2e-6 * cost + draw.normal(0, 0.005)) for cost in range(1000, 90_000, 100)]
    rows += [Measured("B", 0, cost, 0.2 + 4e-6 * cost) for cost in (1000, 2000, 50_000)]
    model = CostModel.fit(1, rows)
    assert model.forward[0].base == pytest.approx(0.1, abs=0.002)
    assert model.forward[0].per_cost == pytest.approx(2e-6, rel=0.02)
    assert model.input_grad == model.weight_grad and model.input_grad[0] == pytest.approx((0.1, 2e-6))
    assert model.hidden == 0.0


@pytest.mark.parametrize(("points", "line"), [
    ([(10, 1.0), (20, 3.0)], (0.0, 0.14)),  # the free fit has base -1; through zero: (10 + 60) / 500
    ([(10, 3.0), (20, 1.0)], (2.0, 0.0)),  # the free fit falls
    ([(10, 1.0), (10, 2.0)], (0.0, 0.15)),  # equal costs
    ([(0, 1.0), (0, 2.0)], (1.5, 0.0)),
    ([(10, 1.0)], (0.0, 0.1)),
])
def test_no_coefficient_is_negative(points, line):
    rows = [Measured(kind, 0, cost, seconds) for cost, seconds in points for kind in "FIW"]
    assert CostModel.fit(1, rows).weight_grad[0] == pytest.approx(line)


def test_slow_pairs_hide_nothing():
    rows = [Measured(kind, 0, 10.0, 1.0) for kind in "FIW"] + [Measured("FB", 0, 10.0, 4.0, 0, 10.0)]
    assert CostModel.fit(1, rows).hidden == 0.0


def test_what_is_missing_is_named():
    rows = [Measured("F", 0, 1.0, 1.0), Measured("B", 0, 1.0, 1.0), Measured("F", 1, 1.0, 1.0),
            Measured("I", 1, 1.0, 1.0)]
    with pytest.raises(ValueError, match="stage 1 has no weight_grad outside pairs"):
        CostModel.fit(2, rows)


def test_a_dict_in_any_order_gives_equal_bits():
    rows = measured(spans(simulate(SCHEDULES["zb-v"].generate(4, 9, 2), TRUE.costs(SLOTS, TOKENS))), SLOTS)
    model = CostModel.fit(8, rows, hop=1 / 3)
    numbers = model.to_dict()
    assert all(type(value) is float for value in numbers.values()) and len(numbers) == 3 * 8 * 2 + 3
    backwards = json.loads(json.dumps(dict(sorted(numbers.items(), reverse=True))))
    assert CostModel.from_dict(backwards) == model
    assert CostModel.from_dict(backwards).costs(SLOTS) == model.costs(SLOTS)
