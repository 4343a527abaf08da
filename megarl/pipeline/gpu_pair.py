"""F&B on a GPU: the expert all-to-all of one micro-batch behind the computation of another.

Megatron-core's chunk plan (models/common/model_chunk_schedule_plan.py) cuts a layer into attention, dispatch, experts
and combine, puts the two exchanges on a stream of their own, and walks the layers of a forward and of a backward side
by side:

    exchanges    combine B |  dispatch F -> dispatch B     | combine F
    computation  attn F    |  experts B -> W B -> experts F | attn B

A backward needs the plan of its forward, so every training forward of these chunks goes through here, alone or paired.
Of Megatron's plan only the layers are used: its own first node would take Megatron's inputs instead of a pack, and its
last would make full logits. Both stay with `PolicyChunk` and the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt.fine_grained_callables import PreProcessNode
from megatron.core.pipeline_parallel.utils import get_comp_stream, set_streams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.autograd.graph import GradientEdge

from megarl.model.chunk import PolicyChunk, unwrapped
from megarl.pipeline.split import Key, WeightGradients


def obstacle(chunk: torch.nn.Module) -> str:
    """Why this chunk cannot run as a plan, or is not worth it; "" if it can. The same on all ranks."""
    bare = unwrapped(chunk)
    config, layers = bare.config, bare.decoder.layers
    if bare.implementation != "transformer_engine":
        return "only Transformer Engine's layers are paired"
    if config.expert_model_parallel_size == 1:  # Megatron frees what was sent, which nothing has copied then
        return "there is no expert parallelism to hide"
    if config.moe_token_dispatcher_type == "allgather":
        return "the allgather dispatcher is not cut into exchanges and computation"
    if not all(isinstance(layer.mlp, MoELayer) for layer in layers):
        return "a plan leaves out the final norm after a dense layer"
    if layers[0].mlp.num_local_experts == 1 and config.expert_tensor_parallel_size == 1:
        return "with one expert a rank, Megatron frees the input that this expert still needs"
    if config.recompute_granularity == "full":
        return "a plan does not recompute whole layers"
    if config.moe_shared_expert_overlap:
        return "shared experts overlap already (moe_shared_expert_overlap)"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "a plan has no place for fp8's delayed scaling"
    return ""


class ChunkPlans:
    """Forward and backward of chunks by plans, keyed by (stage, micro-batch).

    Args:
        chunks: this rank's chunks by stage, bare or in Megatron's DDP; `obstacle` is "" for each.
        weight_gradients: those of `chunks`. A backward while it defers leaves them to it.
    """

    def __init__(self, chunks: Mapping[int, torch.nn.Module], weight_gradients: WeightGradients) -> None:
        self.chunks = {stage: unwrapped(chunk) for stage, chunk in chunks.items()}
        self.weight_gradients = weight_gradients
        self._live: dict[Key, _Live] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        set_streams()  # the present one, and one for exchanges

    def forward(self, key: Key, batch: Any) -> torch.Tensor:
        """F: as `chunk(batch)`, after `chunk.set_input_tensor` where the stage is not the first."""
        return self._begin(key, _Plan(self.chunks[key[0]], batch), None, None)

    def backward(self, key: Key, output: GradientEdge, grad: torch.Tensor) -> None:
        """B or I: as `torch.autograd.backward(output, grad)`, `output` being made of what `forward` gave."""
        live = self._live.pop(key)
        torch.autograd.backward(output, grad)  # of the loss, down to the chunk's own output
        if self.weight_gradients.deferring:
            live.plan.leave_weight_gradients()
        TransformerModelChunkSchedulePlan.run(None, live.plan, b_grad=live.take_grad())

    def pair(self, forward: Key, batch: Any, backward: Key, output: GradientEdge, grad: torch.Tensor) -> torch.Tensor:
        """F of `forward` beside the full B of `backward`; returns what `forward` returns.

        Not within `weight_gradients.at_once`: the plan has its own place for W.

        Raises:
            RuntimeError: an I of the backward's stage still waits for its W, which would get mixed up with this one.
        """
        self.weight_gradients.refuse_waiting(backward)
        live = self._live.pop(backward)
        torch.autograd.backward(output, grad)
        return self._begin(forward, _Plan(self.chunks[forward[0]], batch), live.plan, live.take_grad())

    def _begin(self, key: Key, plan: _Plan, other: _Plan | None, grad: torch.Tensor | None) -> torch.Tensor:
        with plan.padding_for_routers():
            hidden = TransformerModelChunkSchedulePlan.run(plan, other, b_grad=grad)
        live = self._live[key] = _Live(plan)
        return _Cut.apply(self._anchor, hidden.detach(), live)


class _Live:
    """A forward that waits for its backward."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.grad: torch.Tensor | None = None

    def take_grad(self) -> torch.Tensor:
        """The gradient of the chunk's output, which autograd has left here."""
        grad, self.grad = self.grad, None
        assert grad is not None, "the loss does not depend on the chunk's output"
        return grad


class _Cut(torch.autograd.Function):
    """The chunk's output for what comes after it; autograd ends here and leaves the gradient in `live`.

    It keeps no tensor. (Of a plain leaf the gradient edge would keep the whole output until its backward.)
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, live: _Live) -> torch.Tensor:
        ctx.live = live
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.live.grad = grad
        return None, None, None


class _Plan(TransformerModelChunkSchedulePlan):
    """The plan of one micro-batch from a pack to hidden states."""

    def __init__(self, chunk: PolicyChunk, batch: Any) -> None:
        super().__init__(chunk, None, None, None)
        self.routers = [layer.mlp for layer in chunk.decoder.layers]
        self.padding_bt = batch.padding_t[None]
        if chunk.config.sequence_parallel:
            self.padding_bt = scatter_to_sequence_parallel_region(batch.padding_t, group=chunk.pg_collection.tp)[None]
        self.pre_process = _Inputs(chunk, batch, self.state, self.event)
        self.post_process = None  # the layers' last node applies the final norm; the head is the loss's

    def leave_weight_gradients(self) -> None:
        """Have the backward not run W: Transformer Engine's queues keep them."""
        for number in range(self.num_layers()):
            layer = self.get_layer(number)
            layer.attn.backward_dw = layer.mlp.backward_dw = _nothing

    @contextmanager
    def padding_for_routers(self) -> Iterator[None]:
        """Megatron's layer plan routes without the padding mask (fine_grained_callables.py:478): hand it over."""
        for layer in self.routers:
            layer.route = partial(layer.route, padding_mask=self.padding_bt.transpose(0, 1))
        try:
            yield
        finally:
            for layer in self.routers:
                del layer.route  # the class's own again


def _nothing() -> None: ...


class _Inputs(PreProcessNode):
    """The first node: embedding or the received activations, and what attention needs of the pack."""

    def __init__(self, chunk: PolicyChunk, batch: Any, state: Any, event: Any) -> None:
        super().__init__(chunk, state, event, get_comp_stream())
        self.batch = batch

    def forward_impl(self) -> torch.Tensor:
        chunk, batch, state = self.gpt_model, self.batch, self.chunk_state
        chunk.routers.begin(batch)  # nothing of a plan routes again in its backward
        state.packed_seq_params, state.rotary_pos_emb = chunk.attention_inputs(batch)
        state.rotary_pos_cos = state.rotary_pos_sin = state.sequence_len_offset = None
        if chunk.pre_process:
            return chunk.embedding(input_ids=batch.tokens_t[None], position_ids=batch.positions_t[None])
        return chunk.decoder.input_tensor
