"""Megatron-core's column- and row-parallel linears with a weight gradient that can wait (see pipeline.split).

Within `WeightGradients.defer` their backward computes the gradients of input and bias, with the input's reduction over
tensor-parallel ranks, and leaves x and the gradient of y for later. W is the product of the two; under sequence
parallelism x was kept as this rank's share, and its all-gather belongs to W. Anywhere else they are Megatron's own, to
the bit: forward, full backward, no gradients, frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megarl.pipeline.split import WeightGradients

_WholeBackward = layers.LinearWithGradAccumulationAndAsyncCommunication


class _Linear(_WholeBackward):
    """Megatron's function; its backward asks `linear` whether the weight gradient waits."""

    @staticmethod
    def forward(ctx: Any, linear: _CanWait, *args: Any) -> torch.Tensor:
        ctx.linear = linear
        return _WholeBackward.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, store = ctx.linear, ctx.linear.weight_gradients
        if store is not None and store.deferring:
            grad_input, grad_bias = _input_gradients(ctx, grad_output)
            store.collect(_weight_gradient(ctx, grad_output))
            return None, grad_input, None, grad_bias, *[None] * 6
        grad_input, grad_weight, *rest = _WholeBackward.backward(ctx, grad_output)
        if linear.after_weight_gradient:  # DDP has no hook on the parameter itself then
            linear.accumulate(grad_weight)
            grad_weight = None
        return None, grad_input, grad_weight, *rest


def _input_gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of input, reduced over tensor-parallel ranks, and of bias, as Megatron's backward has them."""
    x, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    if ctx.allreduce_dgrad:
        dist.all_reduce(grad_input, group=ctx.tp_group)
    if ctx.sequence_parallel:
        total, grad_input = grad_input, torch.empty_like(x, memory_format=torch.contiguous_format)
        layers.dist_reduce_scatter_func(grad_input, total, group=ctx.tp_group)
    grad_bias = grad_output.contiguous().flatten(0, -2).sum(dim=0) if ctx.use_bias else None
    return grad_input, grad_bias


def _weight_gradient(ctx: Any, grad_output: torch.Tensor) -> Callable[[], None]:
    """The closure of W. It holds x, without the graph that made it, and the gradient of y."""
    linear, group, sequence_parallel = ctx.linear, ctx.tp_group, ctx.sequence_parallel
    if ctx.gradient_accumulation_fusion:
        raise RuntimeError("a split backward cannot use megatron.gradient_accumulation_fusion")
    x = ctx.saved_tensors[0].detach()
    versions = x._version, grad_output._version

    def compute() -> None:
        if (x._version, grad_output._version) != versions:  # autograd refuses this for what it saves
            raise RuntimeError("input or output gradient of a linear was changed in place between I and W")
        total = x
        if sequence_parallel:
            total = layers.get_global_memory_buffer().get_tensor(
                [x.size(0) * group.size(), *x.shape[1:]], x.dtype, "mpu")
            layers.dist_all_gather_func(total, x, group=group)
        grad, total = prepare_input_tensors_for_wgrad_compute(grad_output, total)
        linear.accumulate(grad.t().matmul(total))

    return compute


class _CanWait:
    """What both linears add to Megatron's.

    Attributes:
        weight_gradients: where the closures go; set by the store. None: every backward is a full one.
        after_weight_gradient: what DDP registered for the weight; empty without DDP's `delay_wgrad_compute`.
    """

    weight_gradients: WeightGradients | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after_weight_gradient: list[Callable[[], None]] = []
        self.weight.skip_backward_post_hook = True  # DDP with delay_wgrad_compute registers with us instead

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Megatron's DDP calls this; the name is Transformer Engine's."""
        self.after_weight_gradient.append(hook)

    def accumulate(self, grad_weight: torch.Tensor) -> None:
        """Add a weight gradient where autograd or DDP would."""
        weight = self.weight
        if hasattr(weight, "main_grad") and not self.after_weight_gradient:
            weight.main_grad.add_(grad_weight)
            return
        weight.grad = grad_weight if weight.grad is None else weight.grad.add_(grad_weight)
        for hook in self.after_weight_gradient:  # adds .grad to main_grad, forgets it, may start the reduction
            hook()

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if weight is not self.weight or not weight.requires_grad or not torch.is_grad_enabled():
            return super()._forward_impl(input=input, weight=weight, **options)
        group = layers.get_tensor_model_parallel_group_if_none(options["tp_group"])
        return _Linear.apply(
            self, input, weight, options["bias"], options["gradient_accumulation_fusion"], options["allreduce_dgrad"],
            options["sequence_parallel"], options["grad_output_buffer"], options.get("wgrad_deferral_limit", 0), group)


class ColumnParallelLinear(_CanWait, layers.ColumnParallelLinear):
    """y = x w^T + b with the rows of w over tensor-parallel ranks."""


class RowParallelLinear(_CanWait, layers.RowParallelLinear):
    """y = x w^T with the columns of w over tensor-parallel ranks; Megatron adds the reduction and the bias outside."""
