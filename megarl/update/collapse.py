"""The alarm for routers that send most tokens to few experts, and what it does about it. Pure.

A layer's load has the entropy -sum_e f_e log f_e, f_e the share of a step's tokens at expert e; divided by log N it is
1 when all N experts get as many and 0 when one gets all. (With k experts a token it cannot fall below log k / log N.)
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.schema import CollapseConfig
from megarl.errors import UserMistake


class CollapseAlarm:
    """Watches the loads of a run's optimizer steps, each by the tokens of its own forwards.

    Args:
        config: when it sounds and what it does.

    Attributes:
        low: optimizer steps in a row in which a layer has been below the bound, since the alarm last did something.
        factor: by which balance.coefficient has been multiplied.
        frozen: whether the routers have been stopped from learning.
    """

    def __init__(self, config: CollapseConfig) -> None:
        self.config = config
        self.low, self.factor, self.frozen = 0, 1.0, False

    def judge(self, entropies: Mapping[int, float]) -> str:
        """Look at a step's loads and, if it is time, change `factor` or `frozen`; returns what to tell the user.

        Args:
            entropies: by layer, normalised.

        Raises:
            UserMistake: a layer has collapsed and the action is stop.
        """
        config = self.config
        fallen = sorted((value, layer) for layer, value in entropies.items() if value < config.entropy)
        self.low = self.low + 1 if fallen else 0
        if self.low < config.steps:
            return ""
        self.low = 0
        what = (f"{len(fallen)} layer{'s' * (len(fallen) > 1)} with uneven load for {config.steps} optimizer "
                f"step{'s' * (config.steps > 1)}, the worst {fallen[0][1]} with entropy {fallen[0][0]:.3f} below "
                f"{config.entropy:g}")
        if config.action == "stop":
            raise UserMistake(what, "moe.collapse", "raise model.balance.coefficient or lower moe.router_lr, and go on "
                              "from a checkpoint before the collapse; or choose another moe.collapse.action")
        if config.action == "raise":
            self.factor *= config.factor
            return f"{what}: model.balance.coefficient is now {self.factor:g} times as large"
        if config.action == "freeze":
            already, self.frozen = self.frozen, True
            return f"{what}, although the routers are frozen" if already else f"{what}: the routers are frozen now"
        return what

    def state(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"low": self.low, "factor": self.factor, "frozen": float(self.frozen)}

    def resume(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; {} of a checkpoint without one changes nothing. What another action did is over."""
        if state:
            self.low = int(state["low"])
            self.factor = state["factor"] if self.config.action == "raise" else 1.0
            self.frozen = bool(state["frozen"]) and self.config.action == "freeze"
