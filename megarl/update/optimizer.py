"""Megatron-core's DDP and (distributed) optimizer, set up so that gradients are sums and masters are fp32.

The loss that reaches backward is already divided by global denominators (objective.advantages.token_weights), so
data-parallel ranks add their gradients: `calculate_per_token_loss` in the model's config makes DDP's scaling 1.
"""

from __future__ import annotations

import math

import torch

from megarl.config.schema import OptimConfig
from megarl.errors import MachineFault
from megarl.model import megatron_fixes


def wrap(chunks: list[torch.nn.Module], distributed: bool) -> list[torch.nn.Module]:
    """Each chunk in Megatron-core's DistributedDataParallel, gradients reduced by summation in fp32.

    A chunk's reduction runs beside the work that is left once its own gradients are complete. `delay_wgrad_compute` has
    weights whose gradients come later than the backward pass (`model.linear`) say so themselves.

    Args:
        chunks: GPTModel chunks whose config has calculate_per_token_loss set.
        distributed: lay buffers out for the distributed optimizer.
    """
    megatron_fixes.apply()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    assert all(chunk.config.calculate_per_token_loss for chunk in chunks), "gradients would be averaged, not summed"
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, delay_wgrad_compute=True,
                                        use_distributed_optimizer=distributed, average_in_collective=False)
    return [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]


class Optimizer:
    """AdamW on fp32 masters with global-norm clipping and linear warm-up.

    Update number k (from 1) uses the rate lr * min(1, k / warmup_steps). Weight decay is decoupled and spares
    one-dimensional parameters (norms, biases).

    Args:
        ddp_chunks: from `wrap`, by ascending stage.
        optim, dtype: of the run.
        ends_together: the first and the last stage are on the same rank (placements v and mirrored).
        router_lr: factor of the rate of MoE routers; see `set_router_lr`.

    Attributes:
        updates: optimizer steps done.
        inner: Megatron-core's optimizer.
    """

    def __init__(self, ddp_chunks: list[torch.nn.Module], optim: OptimConfig, dtype: torch.dtype,
                 ends_together: bool = False, router_lr: float = 1.0) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
        from megatron.core.optimizer.optimizer_config import ParamKey
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.chunks, self._ends_together = ddp_chunks, ends_together
        self._settings = {"betas": tuple(optim.betas), "eps": optim.eps, "max_lr": optim.lr, "min_lr": 0.0}
        settings = OptimizerConfig(
            optimizer="adam", lr=optim.lr, min_lr=0.0, weight_decay=optim.weight_decay, adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1], adam_eps=optim.eps, clip_grad=optim.clip or math.inf, params_dtype=dtype,
            bf16=dtype == torch.bfloat16, use_distributed_optimizer=optim.distributed)
        # Megatron-core tells saved groups apart by this mark, whatever their rates; nothing else of it is used here
        routers = {ParamKey(name="*.router.weight"): {"is_decoupled_lr": True, "max_lr": optim.lr * router_lr}}
        self.inner = get_megatron_optimizer(settings, ddp_chunks, get_standard_config_overrides(settings) | routers,
                                            use_gloo_process_groups=False)
        self._router_lr = router_lr
        # its num_steps counts updates; the style is constant, so the decay horizon is never reached
        self.schedule = OptimizerParamScheduler(
            self.inner, init_lr=0.0, max_lr=optim.lr, min_lr=0.0, lr_warmup_steps=optim.warmup_steps,
            lr_decay_steps=optim.warmup_steps + 1, lr_decay_style="constant", start_wd=optim.weight_decay,
            end_wd=optim.weight_decay, wd_incr_steps=0, wd_incr_style="constant")

    @property
    def updates(self) -> int:
        """Optimizer steps done."""
        return self.schedule.num_steps

    @property
    def lr(self) -> float:
        """The rate of the last update (of the first one, before it)."""
        rates = [group["lr"] for group in self.inner.param_groups if not group["is_decoupled_lr"]]
        return float(rates[0]) if rates else 0.0

    def set_router_lr(self, factor: float) -> None:
        """Have the MoE routers learn at `factor` times the rate from now on.

        At 0 they are frozen: neither moments nor weight decay move them, and the gradient norm leaves them out.
        """
        self._router_lr = factor
        for group in self.inner.param_groups:
            if group["is_decoupled_lr"]:
                group["max_lr"] = self._settings["max_lr"] * factor
        self.schedule.step(0)

    def resume_at(self, updates: int) -> None:
        """Continue after so many updates with this run's settings, once the state has been loaded.

        Loading brings back the rate, betas and eps that the state was saved with; the config is what counts.
        """
        for group in self.inner.param_groups:
            group.update(self._settings)
        self.schedule.num_steps = updates
        self.set_router_lr(self._router_lr)

    def zero_grad(self) -> None:
        """Forget gradients; before the first micro-batch of an update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def finish_gradients(self) -> None:
        """Reduce gradients over data, context, tensor (norms) and tied-embedding ranks; after the last backward."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        if self._ends_together:  # Megatron-core would look for the head on the last rank of its pipeline
            groups.embd = groups.pos_embd = _Alone()
        finalize_model_grads(self.chunks, pg_collection=groups)
        if self._ends_together:
            self._tie_gradients()
        if not self._router_lr:
            for chunk in self.chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith(".router.weight"):
                        parameter.main_grad.zero_()

    @torch.no_grad()
    def _tie_gradients(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients, if this rank has them."""
        first, last = self.chunks[0].module, self.chunks[-1].module
        if first.share_embeddings_and_output_weights and first.pre_process and last.post_process and first is not last:
            embedding, head = (chunk.shared_embedding_or_output_weight().main_grad for chunk in (first, last))
            embedding.add_(head)
            head.copy_(embedding)

    def step(self) -> float:
        """Clip, update the masters, copy them to the model's parameters; returns the norm before clipping.

        Raises:
            MachineFault: the norm is not finite; the weights are then unusable and must not be saved or published.
        """
        self.schedule.step(1)
        _, norm, _ = self.inner.step()
        norm = float(norm)
        if not math.isfinite(norm):
            raise MachineFault(f"the gradient norm of update {self.updates} is {norm}")
        return norm


class _Alone:
    """A process group of this rank, as far as `finalize_model_grads` asks."""

    def size(self) -> int:
        return 1
