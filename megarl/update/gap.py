"""The gap between engine and trainer of a whole experience, before anything is learned from it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.config.schema import Config
from megarl.errors import UserMistake
from megarl.objective.gap import ROWS, gap_by_lag, gap_metrics, judge
from megarl.update.experience import Experience


def watch_gap(experience: Experience, config: Config, groups: Groups, step: int) -> tuple[dict[str, float], str | None]:
    """Metrics of the gap by lag, and a warning if it is too large. Collective over the trainers; the same on all.

    Args:
        experience: with its old log-probs.
        step: number of the step, for the message.

    Raises:
        UserMistake: the gap is too large and objective.gap_alarm.action is stop.
    """
    sums = torch.zeros(len(ROWS), config.rollout.max_lag + 1, dtype=torch.float64, device=device.current())
    if groups.tp == 0:
        for batch in (batch for minibatch in experience.minibatches for batch in minibatch.batches):
            values = batch.per_token
            if "old_logprobs" in values:  # on the last stage
                sums += gap_by_lag(values["old_logprobs"], values["engine_logprobs"], values["lag"], batch.mask_t,
                                   sums.size(1))
    dist.all_reduce(sums)
    rows, alarm = sums.tolist(), config.objective.gap_alarm
    found = judge(rows, alarm, step)
    if found and alarm.action == "stop":
        raise UserMistake(found, "objective.gap_alarm", "find the cause (nothing was learned from this step; a resume "
                          "goes on from the newest checkpoint), or set objective.gap_alarm.action: warn")
    return gap_metrics(rows), found
