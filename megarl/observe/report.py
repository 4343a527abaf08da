"""Collects the numbers of a step from all parts of a trainer and tells them, on trainer 0."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.config.load import save_effective
from megarl.config.schema import Config
from megarl.observe.console import step_line
from megarl.observe.curve import draw_reward
from megarl.observe.heartbeat import Heartbeat
from megarl.observe.metrics import MetricWriter, Phases

_TRAINING = ("rollout", "logprobs", "update", "publish")  # what every step does


class Reporter:
    """Metrics, console line and reward curve of a run. Every trainer has one, trainer 0 writes. A context manager.

    Args:
        config: what to write; the effective config is saved with the run.
        run_dir: where.
        groups: this trainer's.
        first_step: what this life records first: 0 is before the first step, a resumed run goes on after its last.

    Attributes:
        phases: timers of the phases of a step.
        heartbeat: the run's sign of life for the outside.
    """

    def __init__(self, config: Config, run_dir: Path, groups: Groups, first_step: int) -> None:
        self._config, self._run_dir = config, run_dir
        self._writes = groups.is_leader and groups.dp == 0
        self.heartbeat = Heartbeat(run_dir if self._writes else None)
        self.heartbeat.step = max(first_step - 1, 0)
        self.phases = Phases(self.heartbeat.beat)
        self._values: dict[str, float] = {}
        if self._writes:
            save_effective(config, run_dir / "config.yaml")
            self._writer = MetricWriter(run_dir, config.observe, first_step)

    def say(self, text: str) -> None:
        """Print on trainer 0."""
        if self._writes:
            print(text, flush=True)

    def add(self, values: dict[str, float]) -> None:
        """Numbers of the step under way."""
        self._values.update(values)

    def add_updates(self, updates: list[dict[str, float]]) -> None:
        """Statistics of a step's optimizer steps: means over those that have them, `optim/skipped` as a sum."""
        skipped = sum(update["optim/skipped"] for update in updates)
        done = [update for update in updates if not update["optim/skipped"]]
        for name in dict.fromkeys(name for update in done for name in update):
            values = [update[name] for update in done if name in update]
            self._values[name] = max(values) if name.endswith("_max") else math.fsum(values) / len(values)
        self._values["optim/skipped"] = skipped

    def step(self, step: int) -> None:
        """Tell step number `step` (finished steps, so 0 is before the first) and forget its numbers."""
        self.heartbeat.step = step
        values = {**self._values, **self.phases.take()}
        seconds = math.fsum(values.get(f"seconds/{phase}", 0.0) for phase in _TRAINING)
        if "tokens/real" in values and seconds:
            values["speed/tokens_per_second"] = values["tokens/real"] / seconds
        values["memory/peak_gb"] = device.peak_memory() / 1e9
        self._values = {}
        if not self._writes:
            return
        self._writer.write(step, values)
        if not self._config.observe.progress:
            return
        if step:
            self.say(step_line(step, self._config.run.steps, values, self._config.objective.kl.coefficient > 0))
        for name, value in values.items():
            if name.startswith("eval/") and name.endswith(("/reward",)) or "/pass@" in name:
                self.say(f"  {name.removeprefix('eval/')} {value:.3f}")

    def draw(self) -> None:
        """Draw the reward curve again."""
        if self._writes and self._config.observe.jsonl:
            draw_reward(self._run_dir)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writes:
            self._writer.close()
