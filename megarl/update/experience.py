"""An experience: one step's samples as packed minibatches on the ranks that train them, with their advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.config.schema import Config
from megarl.data.batch import PackedBatch, build_batch
from megarl.data.buffer import Taken
from megarl.data.exchange import exchange
from megarl.data.packing import PackingPlan
from megarl.data.prompts import source_of
from megarl.data.routing import ReplayShare
from megarl.data.table import SampleTable, cut_minibatches, plan_minibatch
from megarl.objective.advantages import episode_values, group_advantages, overlong_punishment, token_weights
from megarl.objective.kl import kl_estimate
from megarl.objective.recipes import Objective
from megarl.update.experts import Load
from megarl.update.pace import Pace


@dataclass
class Minibatch:
    """The samples of one optimizer step; this rank's micro-batches of it.

    Attributes:
        members: numbers of its samples in the experience's table, over all ranks.
        batches: this rank's micro-batches, as many on every rank.
        real_tokens: prompt and response tokens over all ranks.
        trained_tokens: response tokens that are trained on, over all ranks.
        plan: of the packing.
        schedule, bubble: name of the pipeline schedule, and the fraction of time it is expected to wait.
        loads: per chunk of this rank, where the routers sent the minibatch's tokens when the old log-probs were filled
            in; empty for a dense model.
        routed: the same in the forwards of its last optimizer step.
        stats: per micro-batch what the objective measured; None off the last stage.
    """

    members: np.ndarray
    batches: list[PackedBatch]
    real_tokens: int
    trained_tokens: int
    plan: PackingPlan
    schedule: str
    bubble: float
    loads: list[Load] = field(default_factory=list)
    routed: list[Load] = field(default_factory=list)
    stats: list[dict[str, torch.Tensor] | None] = field(default_factory=list)


@dataclass
class Experience:
    """One step's samples, ready to train on.

    Attributes:
        table: all samples, the same on every trainer.
        minibatches: optimizer steps of one pass.
        epochs: passes.
        pipelined: whether there are several pipeline ranks.
        task: int64 [N], number of the data source of each sample.
    """

    table: SampleTable
    minibatches: list[Minibatch]
    epochs: int
    objective: Objective
    pipelined: bool
    task: np.ndarray

    @classmethod
    def build(cls, taken: Taken, step: int, config: Config, objective: Objective, groups: Groups,
              pace: Pace, pad_token: int, replay: ReplayShare | None = None) -> Experience:
        """Plan the packing, move the samples, build this rank's micro-batches. Collective over the trainers.

        Args:
            taken: the step's samples.
            step: with run.seed, the seed of the shuffle into minibatches.
            config, objective, groups: the run.
            pace: chooses schedules and orders micro-batches.
            pad_token: token id of padding.
            replay: of the engines' routing, what this rank needs; None: nothing.
        """
        table, layout = taken.table, groups.layout
        trained = (table.trained_tokens > 0) & ~(table.truncated & objective.mask_truncated)
        seed = config.run.seed * 1_000_003 + step
        parts = cut_minibatches(table, config.batch.minibatches, trained, seed)
        arranged = [pace.arrange(plan_minibatch(table, members, layout, config.batch, layout.mirrors), number)
                    for number, members in enumerate(parts)]
        target = np.full(len(table), -1)
        for members, (_, plan, _) in zip(parts, arranged, strict=True):
            for rank, bins in enumerate(plan.bins):
                for rows in bins:
                    target[members[rows]] = rank
        samples, numbers = exchange(taken.local, table, target, groups, replay.shape if replay else None)
        minibatches = []
        for members, (schedule, plan, bubble) in zip(parts, arranged, strict=True):
            batches = [build_batch(samples, np.searchsorted(numbers, members[rows]), layout, cp_rank=groups.cp,
                                   numbers=numbers, per_token={"lag": step - samples.versions,
                                                               "turn_advantages": samples.advantages},
                                   pad_token=pad_token, replay=replay).to(device.current())
                       for rows in plan.bins[groups.dp]]
            minibatches.append(Minibatch(members, batches, int(table.lengths[members].sum()),
                                         int(table.trained_tokens[members].sum()), plan, schedule, bubble))
        weights = [source.weight for source in config.data.sources]
        task = np.array([source_of(position, weights) for position in table.position.tolist()], np.int64)
        return cls(table, minibatches, config.batch.epochs, objective, layout.pipeline > 1, task)

    def set_advantages(self) -> None:
        """Fill in `advantages` and `weights` of every micro-batch; after the log-probs, for a KL in the reward."""
        objective, table = self.objective, self.table
        episode_n = torch.from_numpy(table.episode)
        group_e, task_e = (episode_values(torch.from_numpy(value), episode_n, "amax")
                           for value in (table.group, self.task))
        rewards_e = episode_values(torch.from_numpy(table.reward), episode_n, "amax")  # its samples have the same one
        punished_n = overlong_punishment(torch.from_numpy(table.response_tokens), objective)
        rewards_e += episode_values(punished_n, episode_n, "amin")
        if objective.kl_in_reward:
            rewards_e -= objective.kl.coefficient * episode_values(self._kl_of_samples(), episode_n, "sum")
        advantages_n = group_advantages(rewards_e, group_e, objective, task_e)[episode_n]
        for minibatch in self.minibatches:
            weights_n = torch.zeros(len(table), dtype=torch.float64)
            lengths = torch.from_numpy(table.trained_tokens[minibatch.members])
            members = torch.from_numpy(minibatch.members)
            weights_n[members] = token_weights(lengths, objective, episode_n[members])
            for batch in minibatch.batches:
                own_t = batch.per_token.pop("turn_advantages")
                batch.per_token["advantages"] = torch.where(own_t.isnan(), _to_tokens(advantages_n, batch), own_t)
                batch.per_token["weights"] = _to_tokens(weights_n, batch)

    def _kl_of_samples(self) -> torch.Tensor:
        """Sum over each sample's response tokens of the KL estimate, float64 [N]; zeros off the last stage.

        Off the last stage advantages are not used.
        """
        from megatron.core import parallel_state

        total_n = torch.zeros(len(self.table) + 1, dtype=torch.float64, device=device.current())
        for batch in (batch for minibatch in self.minibatches for batch in minibatch.batches):
            if "ref_logprobs" in batch.per_token:
                kl_t = kl_estimate(batch.per_token["old_logprobs"], batch.per_token["ref_logprobs"],
                                   self.objective.kl.estimator)
                kl_t = torch.where(batch.mask_t, kl_t, torch.zeros_like(kl_t))
                total_n.index_add_(0, _samples(batch, len(self.table)), kl_t.double())
        dist.all_reduce(total_n, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return total_n[:-1].cpu()

    def metrics(self) -> dict[str, float]:
        """Sizes and packing of the step, the same on all trainers."""
        plans = [minibatch.plan for minibatch in self.minibatches]
        values = {"tokens/real": float(sum(minibatch.real_tokens for minibatch in self.minibatches)),
                  "tokens/response": float(sum(minibatch.trained_tokens for minibatch in self.minibatches)),
                  "packing/microbatches": float(sum(plan.slots for plan in plans)),
                  "packing/balance": sum(plan.balance for plan in plans) / len(plans),
                  "packing/oversized": float(sum(len(plan.oversized) for plan in plans))}
        if self.pipelined:
            values["pipeline/bubble"] = sum(minibatch.bubble for minibatch in self.minibatches) / len(plans)
            schedules = Counter(minibatch.schedule for minibatch in self.minibatches)
            values |= {f"pipeline/{name}": float(count) for name, count in schedules.items()}
        return values

    def passes(self) -> Iterator[Minibatch]:
        """The optimizer steps: every minibatch once per epoch."""
        for _ in range(self.epochs):
            yield from self.minibatches


def _samples(batch: PackedBatch, none: int) -> torch.Tensor:
    """Number of the sample of each position, int64 [T_local]; `none` in the tail padding."""
    return torch.cat((batch.samples, batch.samples.new_full((1,), none)))[batch.sequence_t]


def _to_tokens(values_n: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """A value per sample as float32 [T_local]; 0 in the tail padding."""
    padded_n = torch.cat((values_n, values_n.new_zeros(1))).to(batch.tokens_t.device)
    return padded_n[_samples(batch, len(values_n))].float()
