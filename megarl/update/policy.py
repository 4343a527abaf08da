"""The policy: its log-probs of an experience, one optimizer step on a minibatch, what its experts saw."""

from __future__ import annotations

import torch

from megarl.checkpoint.hf_import import clear, load_hf
from megarl.cluster.groups import Groups
from megarl.config.schema import Config
from megarl.data.batch import PackedBatch
from megarl.model.build import build_chunks
from megarl.model.chunk import PolicyChunk
from megarl.model.head import token_logprobs
from megarl.model.hf_config import HFConfig
from megarl.model.reference import HostWeights
from megarl.objective.policy import policy_loss
from megarl.objective.recipes import Objective
from megarl.pipeline.execute import Executor
from megarl.pipeline.trace import Span
from megarl.update import across, experts, optimizer
from megarl.update.collapse import CollapseAlarm
from megarl.update.experience import Minibatch
from megarl.update.pace import Pace


class Policy:
    """The trained model on this rank.

    Args:
        config, hf, groups: the run, the model's config, this trainer's groups.
        objective: the loss, resolved.
        goes_on: a checkpoint will be loaded before anything is done with the weights, which are 0 until then: those
            that the run began with are read only if a KL term needs them.

    Attributes:
        chunks: this rank's stages, bare. With debug.rollout_only the only one of these that is there.
        optimizer: with the DDP-wrapped chunks.
        pace: arranges the micro-batches of each optimizer step.
        replay: what this rank needs of the engines' routing; None where it is not replayed.
        collapse: the alarm for the experts' loads.
        news: what it has to say; whoever tells it takes it away.
    """

    def __init__(self, config: Config, hf: HFConfig, groups: Groups, objective: Objective,
                 goes_on: bool = False) -> None:
        from megatron.core import parallel_state

        self.config, self.hf, self.groups, self.objective = config, hf, groups, objective
        layout = groups.layout
        self.pace = Pace(config, hf, groups)
        dtype = torch.bfloat16 if config.model.dtype == "bf16" else torch.float32
        self.chunks = build_chunks(hf, config, layout)
        if goes_on and not objective.needs_reference:
            clear(self.chunks)
        else:
            load_hf(self.chunks, config.model.weights or config.model.path, hf)
        if config.debug.rollout_only:
            return  # weights to sample with, and nothing to train them
        self._reference = HostWeights(self.chunks) if objective.needs_reference else None
        self.optimizer = optimizer.Optimizer(optimizer.wrap(self.chunks, config.optim.distributed), config.optim, dtype,
                                             layout.placement != "looped", config.moe.router_lr)
        self.collapse, self.news = CollapseAlarm(config.moe.collapse), []
        members = groups.pipeline_ranks if layout.pipeline > 1 else ()
        self._executor = Executor(self.optimizer.chunks, layout, hf.hidden, dtype, members, config.cluster.timeout_s,
                                  self.chunks[0].implementation)
        self._tp = parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None
        self._cp = parallel_state.get_context_parallel_group() if layout.context > 1 else None
        self._stage_peers = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self.replay = experts.replay_share(config, hf, self.chunks, groups)

    def old_logprobs(self, minibatch: Minibatch) -> None:
        """Fill in `old_logprobs`, with the weights as they are, and where the minibatch's tokens were routed."""
        with experts.counting(self.chunks, experts.OLD_PASS[self.config.moe.replay]):
            self._fill(minibatch, "old_logprobs")
        minibatch.loads = experts.loads(self.chunks, self._stage_peers)

    def reference_logprobs(self, minibatch: Minibatch) -> None:
        """Fill in `ref_logprobs` with the weights that the run started from; nothing where no KL needs them.

        Its routers choose freely: it is another model, whose own distribution counts.
        """
        if self._reference is not None:
            with self._reference.swapped_in():
                self._fill(minibatch, "ref_logprobs")

    @property
    def spans(self) -> list[Span]:
        """What the last update did when, if it was timed."""
        return self._executor.spans

    def update(self, minibatch: Minibatch, timed: bool = False) -> dict[str, float]:
        """One optimizer step; returns its statistics, equal on all trainers.

        A minibatch without a trained token changes no weight, no moment and no learning rate. `timed`: keep the times
        of its operations as `spans`.

        Raises:
            MachineFault: the gradient norm is not finite.
            UserMistake: as `gradients`.
        """
        if not minibatch.trained_tokens:
            self._executor.spans = []
            return {"optim/skipped": 1.0}
        self.gradients(minibatch, timed or self.pace.is_timing)
        self.pace.learn(self.spans, minibatch.schedule, minibatch.plan)
        return self.step(minibatch)

    def resume_collapse(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint's `collapse.state()`."""
        self.collapse.resume(state)
        self._act_on_collapse()

    def _watch_collapse(self, minibatch: Minibatch) -> None:
        if minibatch.routed and self.config.moe.collapse.entropy:
            if found := self.collapse.judge(experts.entropies(self.chunks, minibatch.routed, self.groups)):
                self.news.append(f"moe.collapse: {found}")
            self._act_on_collapse()

    def _act_on_collapse(self) -> None:
        for chunk in self.chunks:
            if chunk.routers is not None:
                chunk.routers.coefficient = self.config.model.balance.coefficient * self.collapse.factor
        if self.collapse.frozen:
            self.optimizer.set_router_lr(0.0)

    def gradients(self, minibatch: Minibatch, timed: bool = False) -> None:
        """Forward and backward of all micro-batches, gradients reduced; statistics stay with `minibatch`.

        The alarm for collapsed loads looks at these forwards, in time for frozen routers to have no gradients.

        Raises:
            UserMistake: a layer's load has collapsed and moe.collapse.action is stop.
        """
        for chunk, load in zip(self.chunks, minibatch.loads, strict=bool(minibatch.loads)):
            chunk.routers.set_step(load.fractions, minibatch.real_tokens)
        self.optimizer.zero_grad()
        with experts.counting(self.chunks, experts.TRAINING[self.config.moe.replay]):
            minibatch.stats = self._executor.train(minibatch.batches, self._loss, minibatch.schedule, timed)
        minibatch.routed = experts.loads(self.chunks, self._stage_peers)
        self._watch_collapse(minibatch)
        self.optimizer.finish_gradients()

    def step(self, minibatch: Minibatch) -> dict[str, float]:
        """Clip and apply the gradients; returns the statistics of the minibatch."""
        norm = self.optimizer.step()
        if rate := self.config.model.balance.bias_rate:
            experts.move_bias(self.chunks, minibatch.routed, rate)
        stats = across.policy_statistics(minibatch.stats, self.groups, self.config.rollout.max_lag + 1)
        stats |= experts.statistics(self.chunks, minibatch.routed, self.groups, minibatch.real_tokens,
                                    minibatch.loads)
        return stats | {"optim/grad_norm": norm, "optim/lr": self.optimizer.lr, "optim/skipped": 0.0}

    def _logprobs(self, hidden_tbh: torch.Tensor, chunk: PolicyChunk, batch: PackedBatch
                  ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of each position's label, [T_local]."""
        return token_logprobs(
            hidden_tbh[:, 0], chunk.head_weight(), batch.labels_t, vocab_size=self.hf.vocab,
            temperature=self.config.rollout.temperature, tp_group=self._tp,
            sequence_parallel=self.groups.layout.sequence, chunk_tokens=self.config.model.head_chunk_tokens)

    def _fill(self, minibatch: Minibatch, name: str) -> None:
        results = self._executor.forward(minibatch.batches, lambda *args: self._logprobs(*args)[0], minibatch.schedule)
        for batch, logprobs_t in zip(minibatch.batches, results, strict=True):
            if logprobs_t is not None:
                batch.per_token[name] = logprobs_t

    def _loss(self, hidden_tbh: torch.Tensor, chunk: PolicyChunk, batch: PackedBatch
              ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs_t, entropy_t = self._logprobs(hidden_tbh, chunk, batch)
        values = batch.per_token
        return policy_loss(
            logprobs_t, values["old_logprobs"], values["advantages"], values["weights"], batch.mask_t,
            batch.sequence_t, batch.sequences, self.objective, entropy_t=entropy_t,
            ref_t=values.get("ref_logprobs"), engine_t=values["engine_logprobs"], lag_t=values["lag"],
            lags=self.config.rollout.max_lag + 1,
            sum_across=lambda tensor: across.sum_with_gradient(tensor, self._cp))

