"""The alarm for optimizer steps that are not like those before: a loss or gradient norm that leaps. Pure.

A value is compared with the last ones of its kind by median and median absolute deviation (MAD), which a few outliers
do not move; 1.4826 MAD is the standard deviation of a normal distribution. A spike must also be twice the largest of
them, so that a quiet spell does not make the alarm touchy. Values of a spike do not enter the window, but when the
alarm has sounded for half a window in a row, what it hears is the new level, and it starts anew. (Values that are not
finite do not come here: `Optimizer.step` has raised then.)

A step's first update finds a policy that has not moved since the step's log-probs were taken, later ones do not: a
KL from those is compared with that of updates in the same place of their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from megarl.config.schema import GuardConfig
from megarl.errors import MachineFault

# name -> what is never a spike: losses and KL of a policy that has not moved are 0 but for rounding; and small models
# in good health leap to a KL of 0.03 (at 0.05 log-probs have moved by about 0.3)
WATCHED = {"optim/grad_norm": 1e-6, "policy/loss": 0.1, "policy/kl_old": 0.05}
BY_PLACE = ("policy/kl_old",)
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
        self._seen: dict[str, list[float]] = {}  # name, or name@place in the step
        self._alarms: Counter[str] = Counter()  # in a row, by the same
        self._step = self._place = -1

    def judge(self, step: int, stats: Mapping[str, float]) -> str:
        """Look at an optimizer step; what to tell the user, "" if nothing.

        Args:
            step: of the run, which may have several optimizer steps.
            stats: of the optimizer step, equal on all ranks; a name that is missing, and one that was skipped, is not
                judged.
        """
        if not self.config.spike:
            return ""
        self._step, self._place = step, self._place + 1 if step == self._step else 0
        values = {f"{name}@{self._place}" if name in BY_PLACE else name: abs(stats[name])
                  for name in WATCHED if name in stats}
        found = {key: told for key, value in values.items() if (told := self._spike(key, value))}
        for key, value in values.items():
            self._alarms[key] = self._alarms[key] + 1 if key in found else 0
            if self._alarms[key] > self.config.window // 2:  # not a spike: where the run is now
                self._alarms[key], self._seen[key] = 0, []
            elif not found:
                self._seen[key] = [*self._seen.get(key, []), value][-self.config.window:]
        return f"{'; '.join(found.values())} (guard.spike is {self.config.spike:g})" if found else ""

    def _spike(self, key: str, value: float) -> str:
        seen, (name, _, place) = self._seen.get(key, []), key.partition("@")
        if len(seen) < min(LEAST, self.config.window):
            return ""
        middle = median(seen)
        deviation = 1.4826 * median(abs(other - middle) for other in seen)
        if value <= max(WATCHED[name], middle + self.config.spike * deviation, 2 * max(seen)):
            return ""
        these = f"update {int(place) + 1} of the last {len(seen)} steps" if place else (
            f"the last {len(seen)} optimizer steps")
        return f"{name} is {value:.3g}, the median of {these} is {middle:.3g}"

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
        """Continue from a `state`, as far as it is one of this version's; {} changes nothing."""
        self._seen |= {key: list(values) for key, values in state.items()
                       if (name := key.partition("@")[0]) in WATCHED and ("@" in key) == (name in BY_PLACE)}
