"""The alarm for optimizer steps that are not like those before: a loss or gradient norm that leaps. Pure.

A value is compared with the last ones of its kind by median and median absolute deviation (MAD), which a few outliers
do not move; 1.4826 MAD is the standard deviation of a normal distribution. A spike must also be twice the largest of
them, so that a quiet spell does not make the alarm touchy. Values of a spike do not enter the window, but when the
alarm has sounded for half a window in a row, what it hears is the new level, and it starts anew. (Values that are not
finite do not come here: `Optimizer.step` has raised then.)
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from megarl.config.schema import GuardConfig
from megarl.errors import MachineFault

# name -> what is never a spike: losses and KL of a policy that has not moved are 0 but for rounding
WATCHED = {"optim/grad_norm": 1e-6, "policy/loss": 0.1, "policy/kl_old": 0.01}
LEAST = 10  # values before any is judged
DUMPS = 3  # in one life of the run: what follows a spike is often one


class Guard:
    """Watches a run's optimizer steps.

    Args:
        config: when the alarm sounds, and what follows.

    Attributes:
        dumps: how many times `wants_dump` has said so.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config, self.dumps = config, 0
        self._seen: dict[str, list[float]] = {name: [] for name in WATCHED}
        self._alarms = 0

    def judge(self, stats: Mapping[str, float]) -> str:
        """Look at an optimizer step; what to tell the user, "" if nothing.

        Args:
            stats: of the step, equal on all ranks; a name that is missing, and one that was skipped, is not judged.
        """
        if not self.config.spike:
            return ""
        found = [told for name in WATCHED if name in stats and (told := self._spike(name, abs(stats[name])))]
        self._alarms = self._alarms + 1 if found else 0
        if self._alarms > self.config.window // 2:  # not a spike: where the run is now
            self._alarms, self._seen = 0, {name: [] for name in WATCHED}
        if not found:
            for name in WATCHED:
                if name in stats:
                    self._seen[name] = [*self._seen[name], abs(stats[name])][-self.config.window:]
        return "; ".join(found)

    def _spike(self, name: str, value: float) -> str:
        seen = self._seen[name]
        if len(seen) < min(LEAST, self.config.window):
            return ""
        middle = median(seen)
        deviation = 1.4826 * median(abs(other - middle) for other in seen)
        if value <= max(WATCHED[name], middle + self.config.spike * deviation, 2 * max(seen)):
            return ""
        return f"{name} is {value:.3g}, the median of the last {len(seen)} optimizer steps is {middle:.3g}"

    def wants_dump(self) -> bool:
        """Whether the samples of this step are to be written."""
        self.dumps += 1
        return self.dumps <= DUMPS

    def raise_if_asked(self, told: str, where: str) -> None:
        """End the run after a spike, if that is the action.

        Raises:
            MachineFault: with what was told, and where the samples are.
        """
        if told and self.config.action == "stop":
            raise MachineFault(f"{told}{f'; its samples are in {where}' if where else ''}")

    def state(self) -> dict[str, list[float]]:
        """What a resumed run needs."""
        return {name: list(values) for name, values in self._seen.items()}

    def resume(self, state: Mapping[str, list[float]]) -> None:
        """Continue from a `state`; {} of a checkpoint without one changes nothing."""
        self._seen |= {name: list(values) for name, values in state.items() if name in self._seen}
