"""Runs pipeline schedules on model chunks: training and forward-only, any number of stages (one included)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megarl.config.layout import Layout
from megarl.pipeline.channels import Channels
from megarl.pipeline.check import Report, check
from megarl.pipeline.schedule import GENERATORS, Op, Schedule, Transfer, feeds, needs

Stats = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.nn.Module, Any], tuple[torch.Tensor, Stats]]


@lru_cache(maxsize=64)
def plan(name: str, ranks: int, microbatches: int, forward_only: bool) -> tuple[Schedule, Report]:
    """A generated and checked schedule; kept, since generating and checking takes milliseconds."""
    schedule = GENERATORS[name](ranks, microbatches)
    schedule = schedule.forward_only() if forward_only else schedule
    return schedule, check(schedule)


class Executor:
    """Walks one pipeline rank through its list of operations.

    Making it is collective over all trainers. Every rank of a pipeline is given the same micro-batches, so that all
    message shapes are known beforehand.

    Args:
        chunks: this rank's chunks, one per stage that it holds, by ascending stage; bare or in Megatron-core's
            DistributedDataParallel. `chunk(batch)` gives hidden states [T_local (/ tensor with sequence parallelism),
            1, h]; `chunk.set_input_tensor(hidden)` gives a later stage its input.
        layout: degrees of the trainers.
        hidden_size: h.
        dtype: of the hidden states between stages.
        pp_group: the ranks of this pipeline; None where layout.pipeline is 1.
        schedule: name of a generator in `schedule.GENERATORS`.
        timeout_s: of every exchange.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: Layout, hidden_size: int, dtype: torch.dtype,
                 pp_group: dist.ProcessGroup | None = None, schedule: str = "1f1b", timeout_s: float = 600.0) -> None:
        if layout.pipeline != (pp_group.size() if pp_group else 1):
            raise ValueError(f"the layout has {layout.pipeline} pipeline ranks, the group another number")
        self.channels = Channels(pp_group, timeout_s)
        self.rank = pp_group.rank() if pp_group else 0
        self.ranks, self.schedule = layout.pipeline, schedule
        self.chunks = list(chunks)
        self.shards = layout.tensor if layout.sequence else 1
        self.hidden_size, self.dtype = hidden_size, dtype
        self.peak_live = 0

    def train(self, batches: Sequence[Any], loss_fn: Loss,
              on_last_backward: Callable[[torch.nn.Module], None] | None = None) -> list[Stats | None]:
        """Forward and backward of all micro-batches; gradients are accumulated where the chunks accumulate them.

        A chunk in DistributedDataParallel is in `no_sync` until its last backward, so that an overlapped gradient
        reduction starts there and once.

        Args:
            batches: the optimizer step's PackedBatches, the same on all pipeline ranks.
            loss_fn: `(hidden, chunk, batch) -> (loss, stats)`, called on the last stage with the bare chunk; the
                gradient is that of the sum of all losses.
            on_last_backward: called with the chunk as given, after its last backward.
        Returns:
            Stats by micro-batch on the rank that holds the last stage, None for each elsewhere. `peak_live` is the
            largest number of stage activations that were held at once.
        """
        walk = _Walk(self, batches, *plan(self.schedule, self.ranks, len(batches), False), loss_fn, on_last_backward)
        walk.run()
        self.peak_live = walk.peak_live
        return walk.results

    @torch.no_grad()
    def forward(self, batches: Sequence[Any], fn: Callable[[torch.Tensor, torch.nn.Module, Any], Any]) -> list[Any]:
        """Forward only, without gradients.

        Args:
            batches: as in `train`.
            fn: `(hidden, chunk, batch) -> result`, called on the last stage.
        Returns:
            Results by micro-batch on the rank that holds the last stage, None for each elsewhere.
        """
        walk = _Walk(self, batches, *plan(self.schedule, self.ranks, len(batches), True),
                     lambda *args: (None, fn(*args)))
        walk.run()
        return walk.results

    def shape(self, batch: Any) -> tuple[int, int, int]:
        """[T_local (/ tensor with sequence parallelism), 1, h] of the hidden states of a micro-batch."""
        tokens, rest = divmod(batch.tokens_t.numel(), self.shards)
        if rest:
            raise ValueError(f"{batch.tokens_t.numel()} tokens cannot be shared by {self.shards} tensor ranks")
        return tokens, 1, self.hidden_size


class _Walk:
    """One pass over a schedule on one rank.

    `boundary` holds what has crossed or will cross a stage's edge, under the operation that takes it: activations
    before F, gradients before B (1 for the loss itself). `live` holds, between F and B, the stage's input (None on
    the first stage) and the gradient edge of its output, which keeps the graph but not the output tensor itself.
    """

    def __init__(self, executor: Executor, batches: Sequence[Any], schedule: Schedule, report: Report,
                 loss_fn: Callable[..., tuple[torch.Tensor | None, Any]],
                 on_last_backward: Callable[[torch.nn.Module], None] | None = None) -> None:
        self.executor, self.batches, self.schedule = executor, batches, schedule
        self.steps = report.steps[executor.rank]
        self.loss_fn, self.on_last_backward = loss_fn, on_last_backward
        self.chunks = dict(zip(schedule.stages_of(executor.rank), executor.chunks, strict=True))
        self.last_backward = {op.stage: op for op in schedule.ops[executor.rank] if op.kind == "B"}
        self.boundary: dict[Op, torch.Tensor] = {}
        self.live: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge]] = {}
        self.results: list[Any] = [None] * len(batches)
        self.peak_live = 0

    def run(self) -> None:
        """All steps of this rank."""
        shapes = [self.executor.shape(batch) for batch in self.batches]
        channels = self.executor.channels
        channels.agree(zlib.crc32(repr((self.schedule.name, shapes, self.executor.dtype)).encode()))
        for step in self.steps:
            receives = [(transfer, self._buffer(transfer, shapes)) for transfer in step.receives]
            channels.exchange([(transfer, self.boundary.pop(transfer.op)) for transfer in step.sends], receives)
            self.boundary.update((transfer.op, tensor) for transfer, tensor in receives)
            if step.op is not None:
                (self._forward if step.op.kind == "F" else self._backward)(step.op)
        channels.drain()
        assert not self.boundary and not self.live, "the schedule left tensors behind"

    def _buffer(self, transfer: Transfer, shapes: list[tuple[int, int, int]]) -> torch.Tensor:
        number = transfer.op.microbatch
        return torch.empty(shapes[number], dtype=self.executor.dtype, device=self.batches[number].tokens_t.device)

    def _forward(self, op: Op) -> None:
        chunk, batch = self.chunks[op.stage], self.batches[op.microbatch]
        bare = getattr(chunk, "module", chunk)
        received = None
        if needs(op, self.schedule.stages):
            received = self.boundary.pop(op).requires_grad_(torch.is_grad_enabled())
            bare.set_input_tensor(received)
        output = chunk(batch)
        taker = feeds(op, self.schedule.stages)
        if taker is None:
            output, self.results[op.microbatch] = self.loss_fn(output, bare, batch)
        else:
            assert tuple(output.shape) == self.executor.shape(batch) and output.dtype == self.executor.dtype, (
                f"{op} gave {output.dtype} {tuple(output.shape)}, planned {self.executor.shape(batch)}")
            self.boundary[taker] = output.detach().contiguous()
        if torch.is_grad_enabled():
            if taker is None:  # d loss / d loss
                self.boundary[Op("B", op.stage, op.microbatch)] = torch.ones_like(output)
            self.live[op.stage, op.microbatch] = received, get_gradient_edge(output)
            self.peak_live = max(self.peak_live, len(self.live))

    def _backward(self, op: Op) -> None:
        chunk = self.chunks[op.stage]
        received, output = self.live.pop((op.stage, op.microbatch))
        last = self.last_backward[op.stage] == op
        with nullcontext() if last or not hasattr(chunk, "no_sync") else chunk.no_sync():
            torch.autograd.backward(output, self.boundary.pop(op))
        taker = feeds(op, self.schedule.stages)
        if taker:
            self.boundary[taker] = received.grad.contiguous()
        if last and self.on_last_backward:
            self.on_last_backward(chunk)
