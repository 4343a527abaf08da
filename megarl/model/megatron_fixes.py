"""Bugs of Megatron-core 0.16.1 that bite on any device, each with its remedy. Applied once, before models are built.

Every fix says what fails without it. A fix is dropped when the pinned version no longer needs it.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.layout import Layout

_applied = False


def apply() -> None:
    """Patch the installed Megatron-core; idempotent. `cluster.device.prepare` must have run before."""
    global _applied
    if _applied:
        return
    _applied = True
    _router_gemm_name()
    _mla_without_te()
    _torch_adam_checkpoints()


def mark_experts(model: torch.nn.Module, layout: Layout) -> None:
    """Have DDP reduce the experts' gradients over the ranks that hold the same experts.

    Megatron-core takes experts out of the dense data-parallel group only where expert parallelism is above 1. With
    expert_tensor below tensor and expert 1 (layers.py: `is_expert and expert_parallel`) each tensor rank would keep
    the gradient of its own tokens, without an error.
    """
    apart = layout.expert > 1 or layout.expert_tensor != layout.tensor
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = not apart


def _router_gemm_name() -> None:
    """moe_utils.router_gating_linear: NameError 'te_general_gemm' where Transformer Engine is not installed."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _mla_without_te() -> None:
    """multi_latent_attention takes HAVE_TE from an import that succeeds without TE: TypeError on TELinear None."""
    import megatron.core.extensions.transformer_engine as te
    import megatron.core.transformer.multi_latent_attention as mla

    if not te.HAVE_TE:
        mla.HAVE_TE = False


def _torch_adam_checkpoints() -> None:
    """The distributed optimizer against checkpoints, mostly where it runs torch's AdamW (no TE, no apex).

    Without: state_dict() asserts before the first step (distrib_optimizer.py:642), and there are no moments to save
    (:1069); a fully_reshardable load raises KeyError 'step' (:940); and, silently, all parameters share one loaded
    `step` tensor (:812), which the next step then increments once per parameter. The fused Adams of TE and apex count
    steps in their parameter groups and must be given none: TE's looks up the dtype of every state by its name.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def with_initial_state(self: Any) -> Any:
        self.init_state_fn(self.optimizer, self.config)  # moments of 0 where there are none
        if isinstance(self.optimizer, torch.optim.Adam):  # AdamW is one
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
        return state_dict(self)

    def keeping_step(self: Any, model_param: Any, tensors: dict) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        with torch.no_grad():
            return set_states(self, model_param, {**step, **tensors})

    def with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for entry in self.optimizer.state.values():
            if "step" in entry:
                entry["step"] = entry["step"].clone()

    DistributedOptimizer.state_dict = with_initial_state
    DistributedOptimizer._set_main_param_and_optimizer_states = keeping_step
    DistributedOptimizer.load_state_dict = with_own_steps
