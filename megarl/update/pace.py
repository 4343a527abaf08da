"""Which pipeline schedule an optimizer step runs, and the order of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from megarl.cluster.groups import Groups
from megarl.config.schema import Config
from megarl.config.stages import head_in_layers, parts
from megarl.data.packing import PackingPlan
from megarl.model.hf_config import HFConfig
from megarl.pipeline.choose import choose
from megarl.pipeline.cost_model import CostModel, Line, Measured, measured
from megarl.pipeline.generators import fitting
from megarl.pipeline.order import order
from megarl.pipeline.simulate import simulator
from megarl.pipeline.trace import Span

# with `pipeline.schedule: auto`: what is timed before costs are known. The first update, which allocates and compiles,
# is not. Together they run F, I, W and, in a V, pairs.
_WARM_UP = {"looped": ("zb-h1",), "v": ("zb-v", "dualpipev")}
_UPDATES = 4  # at least so many updates, the first one included


class Arranged(NamedTuple):
    """How an optimizer step is to run.

    Attributes:
        schedule: a name in `pipeline.generators.SCHEDULES`.
        plan: the packing with its slots in the order in which they run.
        bubble: the fraction of all pipeline ranks' time that the simulator expects to be spent waiting.
    """

    schedule: str
    plan: PackingPlan
    bubble: float


class Pace:
    """Arranges each optimizer step of a run; the same on every trainer.

    With `pipeline.schedule: auto` the operations of a few updates are timed, and a model of their costs is fitted,
    shared and kept for good (`state`). Until then, and with a schedule given, operations count as their share of the
    layers. Deterministic but for those timings.
    """

    def __init__(self, config: Config, hf: HFConfig, groups: Groups) -> None:
        self._groups, self._layout, self._given = groups, groups.layout, config.pipeline.schedule
        self._reorder, self._memory = config.pipeline.reorder, config.pipeline.memory
        model = parts(hf, self._layout, config.parallel.layers_per_stage)
        work = [part.layers + head_in_layers(hf) * part.is_last for part in model]
        self._costs = CostModel(*(tuple(Line(0.0, layers) for layers in work),) * 3)
        self._layers = {f"layers.{part.stage}": part.layers for part in model}
        self._is_measured, self._updates = False, 0
        self._timed: set[str] = set()
        self._rows: list[Measured] = []
        self._notes: dict[str, bool] = {}

    @property
    def is_timing(self) -> bool:
        """Whether the next update is to be timed."""
        return self._given == "auto" and self._layout.pipeline > 1 and not self._is_measured and self._updates > 0

    def arrange(self, plan: PackingPlan, ahead: int = 0) -> Arranged:
        """Choose the schedule for a plan's micro-batches, and their order; `ahead` updates come before this one."""
        layout = self._layout
        if layout.pipeline == 1:
            return Arranged("1f1b", plan, 0.0)
        costs = self._costs.costs(plan.cost.max(axis=0))
        name = self._given
        if name == "auto":
            name = self._untimed(self._updates + ahead)
            if self._is_measured:
                name = choose(layout.placement, layout.pipeline, layout.chunks, costs, self._memory, self._reorder)
        _, instead = fitting(name, layout.pipeline, plan.slots, layout.chunks)
        if instead:
            self._notes.setdefault(instead, False)
        if self._reorder:
            at = order(costs, name, layout.pipeline, layout.chunks)
            plan, costs = plan.reordered(at), costs.reordered(at)
        line = simulator(name, layout.pipeline, plan.slots, layout.chunks).run(costs)
        return Arranged(name, plan, line.bubble_fraction)

    def _untimed(self, update: int) -> str:
        """What a warm-up update is to run: of what has not been timed yet, the first one twice."""
        first, *others = _WARM_UP[self._layout.placement]
        return next((name for name in others if name not in self._timed and update > 1), first)

    def learn(self, spans: Sequence[Span], schedule: str, plan: PackingPlan) -> None:
        """Take in what an update did; collective over the trainers when the last timed one has ended.

        Args:
            spans: of this rank, [] if the update was not timed.
            schedule, plan: of the update's minibatch, as arranged.
        """
        timing, self._updates = self.is_timing, self._updates + 1
        if not timing:
            return
        self._timed.add(schedule)
        groups = self._groups
        if groups.tp == groups.cp == groups.dp == 0:  # one pipeline speaks for all
            self._rows += measured(spans, plan.cost.max(axis=0))
        if self._updates >= _UPDATES and self._timed.issuperset(_WARM_UP[self._layout.placement]):
            rows: list[list[Measured]] = [[]] * dist.get_world_size()
            dist.all_gather_object(rows, self._rows)
            fitted = [CostModel.fit(self._layout.stages, sum(rows, [])).to_dict() if dist.get_rank() == 0 else {}]
            dist.broadcast_object_list(fitted, src=0)
            self._costs, self._is_measured = CostModel.from_dict(fitted[0]), True
            self._rows.clear()

    def news(self) -> list[str]:
        """What stood in for a schedule that did not fit, each reason once."""
        told = [note for note, was_told in self._notes.items() if not was_told]
        self._notes.update(dict.fromkeys(told, True))
        return told

    def state(self) -> dict[str, float]:
        """The measured costs, and the layers of each stage that they are for; {} before they are known."""
        return self._costs.to_dict() | self._layers if self._is_measured else {}

    def resume(self, state: dict[str, float]) -> None:
        """Take measured costs over, unless stages have other layers now."""
        if self._layers.items() <= state.items():
            costs = {name: value for name, value in state.items() if name not in self._layers}
            self._costs, self._is_measured = CostModel.from_dict(costs), True
