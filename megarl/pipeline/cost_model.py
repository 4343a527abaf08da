"""Seconds of a stage's operations as a function of a micro-batch's cost, fitted to measured steps. Pure.

One rank fits after the warm-up steps, all ranks and the checkpoint get `to_dict`, and from then on every rank works out
the same costs for every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.pipeline.schedule import Pair
from megarl.pipeline.simulate import Costs
from megarl.pipeline.trace import Span

_KINDS = {"F": "forward", "I": "input_grad", "W": "weight_grad"}


class Measured(NamedTuple):
    """One item of a warm-up step.

    Attributes:
        kind: F, I, W, B, or FB for a pair, whose backward is that of (stage2, cost2).
        stage: it belongs to.
        cost: of the micro-batch (`PackingPlan.cost`; where ranks wait for each other, the largest of its slot).
        seconds: it took.
    """

    kind: str
    stage: int
    cost: float
    seconds: float
    stage2: int = 0
    cost2: float = 0.0


class Line(NamedTuple):
    """seconds = base + per_cost * cost; neither is negative."""

    base: float
    per_cost: float

    def at(self, cost):
        """Seconds for a cost, or for an array of costs."""
        return self.base + self.per_cost * cost


@dataclass(frozen=True)
class CostModel:
    """What each operation of each stage takes.

    Attributes:
        forward, input_grad, weight_grad: a Line for each stage.
        hidden: the share of the shorter of F and I that a pair hides of each; 0 where pairs run one after the other.
        hop, hop_per_token: seconds of a transfer to another rank, and of each token in it.
    """

    forward: tuple[Line, ...]
    input_grad: tuple[Line, ...]
    weight_grad: tuple[Line, ...]
    hidden: float = 0.0
    hop: float = 0.0
    hop_per_token: float = 0.0

    @classmethod
    def fit(cls, stages: int, rows: Iterable[Measured], hop: float = 0.0, hop_per_token: float = 0.0) -> CostModel:
        """Least squares with coefficients that are not negative, for each stage and kind.

        A stage that ran no split backward has its B divided equally. Pairs count only for `hidden`. Values are rounded
        to 9 digits.

        Raises:
            ValueError: a stage has no F, or neither B nor both I and W, outside pairs.
        """
        by: dict[tuple[str, int], list[Measured]] = defaultdict(list)
        for row in rows:
            by[row.kind, -1 if row.kind == "FB" else row.stage].append(row)
        found: dict[str, list[Line]] = {kind: [] for kind in _KINDS}
        for stage in range(stages):
            lines = {kind: _fit_line(by[kind, stage]) for kind in "FBIW" if by[kind, stage]}
            if "B" in lines and not {"I", "W"} <= lines.keys():
                lines["I"] = lines["W"] = Line(*(_rounded(value / 2) for value in lines["B"]))
            for kind, of_stages in found.items():
                if kind not in lines:
                    raise ValueError(f"stage {stage} has no {_KINDS[kind]} outside pairs in the measured steps")
                of_stages.append(lines[kind])
        model = cls(*(tuple(found[kind]) for kind in _KINDS), 0.0, _rounded(hop), _rounded(hop_per_token))
        return cls(model.forward, model.input_grad, model.weight_grad, model._fit_hidden(by["FB", -1]), model.hop,
                   model.hop_per_token)

    def costs(self, slot_costs: Sequence[float] | np.ndarray,
              tokens: Sequence[int] | np.ndarray | None = None) -> Costs:
        """The costs of a step.

        Args:
            slot_costs: for each micro-batch its cost, as in `Measured` (`PackingPlan.cost.max(axis=0)`).
            tokens: for each micro-batch the tokens in a transfer; may be left out if hop_per_token is 0.
        """
        cost = np.asarray(slot_costs, np.float64)
        forward, input_grad, weight_grad = (np.stack([line.at(cost) for line in getattr(self, name)])
                                            for name in _KINDS.values())
        if tokens is None and self.hop_per_token:
            raise ValueError("hops depend on tokens: give the tokens of each micro-batch")
        hop = self.hop + self.hop_per_token * np.asarray(0 if tokens is None else tokens, np.float64)
        return Costs(forward, input_grad, weight_grad, self.hidden * np.minimum(forward, input_grad),
                     np.broadcast_to(hop, cost.shape).copy())

    def to_dict(self) -> dict[str, float]:
        """All numbers by name, for the wire and the checkpoint."""
        found = {f"{name}.{stage}.{part}": value for name in _KINDS.values()
                 for stage, line in enumerate(getattr(self, name)) for part, value in line._asdict().items()}
        return found | {"hidden": self.hidden, "hop": self.hop, "hop_per_token": self.hop_per_token}

    @classmethod
    def from_dict(cls, numbers: dict[str, float]) -> CostModel:
        """The inverse of `to_dict`, whatever the order of the names."""
        stages = sum(name.startswith("forward.") and name.endswith(".base") for name in numbers)
        lines = [tuple(Line(*(float(numbers[f"{name}.{stage}.{part}"]) for part in Line._fields))
                       for stage in range(stages)) for name in _KINDS.values()]
        return cls(*lines, *(float(numbers[name]) for name in ("hidden", "hop", "hop_per_token")))

    def _fit_hidden(self, pairs: list[Measured]) -> float:
        saved, could = [], []
        for row in pairs:
            forward, backward = self.forward[row.stage].at(row.cost), self.input_grad[row.stage2].at(row.cost2)
            apart = forward + backward + self.weight_grad[row.stage2].at(row.cost2)
            could.append(min(forward, self.input_grad[row.stage].at(row.cost))
                         + min(backward, self.forward[row.stage2].at(row.cost2)))
            saved.append(apart - row.seconds)
        if not any(could):
            return 0.0
        return _rounded(min(max(float(np.dot(saved, could) / np.dot(could, could)), 0.0), 1.0))


def measured(spans: Iterable[Span], slot_costs: Sequence[float] | np.ndarray) -> list[Measured]:
    """The rows of one traced step, or of one rank of it.

    Args:
        slot_costs: for each micro-batch, by its number in the schedule, its cost.
    """
    rows = []
    for span in spans:
        item, seconds = span.item, span.end - span.start
        if isinstance(item, Pair):
            one, two = item.forward, item.backward
            rows.append(Measured("FB", one.stage, float(slot_costs[one.microbatch]), seconds, two.stage,
                                 float(slot_costs[two.microbatch])))
        else:
            rows.append(Measured(item.kind, item.stage, float(slot_costs[item.microbatch]), seconds))
    return rows


def _fit_line(rows: list[Measured]) -> Line:
    """The line with the least squared error among those with no negative coefficient. Equal costs: through zero."""
    cost, seconds = (np.array([getattr(row, name) for row in rows], np.float64) for name in ("cost", "seconds"))
    spread = cost - cost.mean()
    if not cost.any():
        return Line(_rounded(float(seconds.mean())), 0.0)
    through_zero = Line(0.0, _rounded(float(np.dot(cost, seconds) / np.dot(cost, cost))))
    if not spread.any():
        return through_zero
    slope = float(np.dot(spread, seconds) / np.dot(spread, spread))
    base = float(seconds.mean() - slope * cost.mean())
    if slope < 0:
        return Line(_rounded(float(seconds.mean())), 0.0)
    return Line(_rounded(base), _rounded(slope)) if base >= 0 else through_zero


def _rounded(value: float) -> float:
    """To 9 significant digits, which the text of a checkpoint keeps."""
    return float(f"{value:.9g}")
