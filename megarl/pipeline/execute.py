"""Runs pipeline schedules on model chunks: training and forward-only, any placement of stages (one stage included)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megarl.cluster import device
from megarl.config.layout import Layout
from megarl.pipeline.channels import Channels
from megarl.pipeline.check import Report, check
from megarl.pipeline.generators import fitting
from megarl.pipeline.schedule import Item, Op, Pair, Schedule, Transfer, Wiring, parts
from megarl.pipeline.split import weight_gradients
from megarl.pipeline.trace import Span

if TYPE_CHECKING:
    from megarl.pipeline.gpu_pair import ChunkPlans

Stats = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.nn.Module, Any], tuple[torch.Tensor, Stats]]


@lru_cache(maxsize=256)
def plan(name: str, ranks: int, microbatches: int, chunks: int, forward_only: bool) -> tuple[Schedule, Report]:
    """The schedule `name`, or what stands in for it with so few micro-batches; checked, and kept: that takes time."""
    schedule, _ = fitting(name, ranks, microbatches, chunks)
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
        members: global ranks of this pipeline, in its order; one rank needs none.
        timeout_s: of every exchange.
        implementation: of the chunks' layers.

    Attributes:
        peak_live: the largest number of stage activations that the last `train` held at once.
        spans: what the last `train` did when, if it was timed.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: Layout, hidden_size: int, dtype: torch.dtype,
                 members: Sequence[int] = (), timeout_s: float = 600.0,
                 implementation: Literal["local", "transformer_engine"] = "local") -> None:
        if layout.pipeline != max(len(members), 1):
            raise ValueError(f"the layout has {layout.pipeline} pipeline ranks, {len(members)} are given")
        self.channels = Channels(members, timeout_s)
        self.rank = members.index(dist.get_rank()) if len(members) > 1 else 0
        self.ranks, self.chunks_per_rank = layout.pipeline, layout.chunks
        held = [stage for stage, holders in enumerate(layout.placement_table) if self.rank in holders]
        self.chunks = dict(zip(held, chunks, strict=True))
        self.weight_gradients = weight_gradients(self.chunks, implementation)
        self.plans = self._plans() if device.kind() != "cpu" else None
        self.shards = layout.tensor if layout.sequence else 1
        self.hidden_size, self.dtype = hidden_size, dtype
        self.peak_live = 0
        self.spans: list[Span] = []

    def train(self, batches: Sequence[Any], loss_fn: Loss, schedule: str = "1f1b", timed: bool = False
              ) -> list[Stats | None]:
        """Forward and backward of all micro-batches; gradients are accumulated where the chunks accumulate them.

        A chunk in DistributedDataParallel is in `no_sync` but for the operations that complete its gradients: the last
        B, or the last I and the last W. So an overlapped reduction starts there and once.

        Args:
            batches: the optimizer step's PackedBatches, the same on all pipeline ranks.
            loss_fn: `(hidden, chunk, batch) -> (loss, stats)`, called on the last stage with the bare chunk; the
                gradient is that of the sum of all losses.
            schedule: a name in `generators.SCHEDULES`; its fallback is taken where it needs more micro-batches.
            timed: note when each operation began and ended, waiting for the device both times.
        Returns:
            Stats by micro-batch on the rank that computed its loss, None for each elsewhere.
        """
        walk = _Walk(self, batches, *self._plan(schedule, batches, False), loss_fn, timed)
        walk.run()
        self.peak_live, self.spans = walk.peak_live, walk.spans
        return walk.results

    @torch.no_grad()
    def forward(self, batches: Sequence[Any], fn: Callable[[torch.Tensor, torch.nn.Module, Any], Any],
                schedule: str = "1f1b") -> list[Any]:
        """Forward only, without gradients; each micro-batch takes the same way as in `train` with that schedule.

        Args:
            batches: as in `train`.
            fn: `(hidden, chunk, batch) -> result`, called on the last stage.
            schedule: as in `train`.
        Returns:
            Results by micro-batch on the rank that computed it, None for each elsewhere.
        """
        walk = _Walk(self, batches, *self._plan(schedule, batches, True), lambda *args: (None, fn(*args)))
        walk.run()
        return walk.results

    def _plan(self, schedule: str, batches: Sequence[Any], forward_only: bool) -> tuple[Schedule, Report]:
        return plan(schedule, self.ranks, len(batches), self.chunks_per_rank, forward_only)

    def _plans(self) -> ChunkPlans | None:
        """What runs pairs at the same time, if these chunks can be paired."""
        from megarl.pipeline.gpu_pair import ChunkPlans, obstacle

        possible = not any(obstacle(chunk) for chunk in self.chunks.values())
        return ChunkPlans(self.chunks, self.weight_gradients) if possible else None

    def shape(self, batch: Any) -> tuple[int, int, int]:
        """[T_local (/ tensor with sequence parallelism), 1, h] of the hidden states of a micro-batch."""
        tokens, rest = divmod(batch.tokens_t.numel(), self.shards)
        if rest:
            raise ValueError(f"{batch.tokens_t.numel()} tokens cannot be shared by {self.shards} tensor ranks")
        return tokens, 1, self.hidden_size


class _Walk:
    """One pass over a schedule on one rank.

    `boundary` holds what has crossed or will cross a stage's edge, under the operation that takes it: activations
    before F, gradients before B or I (1 for the loss itself). `graphs` holds, from F to B or I, the stage's input (None
    on the first stage) and the gradient edge of its output, which keeps the graph but not the output tensor itself.
    An activation is live from F to B or W: what W needs is freed there.
    """

    def __init__(self, executor: Executor, batches: Sequence[Any], schedule: Schedule, report: Report,
                 loss_fn: Callable[..., tuple[torch.Tensor | None, Any]], timed: bool = False) -> None:
        self.executor, self.batches, self.schedule = executor, batches, schedule
        self.steps, self.wiring = report.steps[executor.rank], Wiring(schedule)
        self.loss_fn, self.timed = loss_fn, timed
        assert schedule.stages_of(executor.rank) == tuple(executor.chunks), f"{schedule.name} has another placement"
        self.chunks, self.weight_gradients = executor.chunks, executor.weight_gradients
        pairs = any(isinstance(item, Pair) for items in schedule.items for item in items)
        self.plans = executor.plans if pairs else None  # then for all: a backward needs its forward's plan
        ops = schedule.ops(executor.rank)
        self.last_inputs = {op.stage: op for op in ops if op.kind in "BI"}
        self.last_weights = {op.stage: op for op in ops if op.kind in "BW"}  # a last B is the last of both (`check`)
        self.boundary: dict[Op, torch.Tensor] = {}
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge]] = {}
        self.live: set[tuple[int, int]] = set()
        self.results: list[Any] = [None] * len(batches)
        self.peak_live = 0
        self.spans: list[Span] = []

    def run(self) -> None:
        """All steps of this rank."""
        shapes = [self.executor.shape(batch) for batch in self.batches]
        channels = self.executor.channels
        channels.agree(zlib.crc32(repr((self.schedule.name, shapes, self.executor.dtype)).encode()))
        begun = self._now()
        for step in self.steps:
            receives = [(transfer, self._buffer(transfer, shapes)) for transfer in step.receives]
            channels.exchange([(transfer, self.boundary.pop(transfer.op)) for transfer in step.sends], receives)
            if step.item is not None:
                self.boundary.update((t.op, channels.receive(t)) for t in self.wiring.receives(step.item))
                self._item(step.item, begun)
        channels.drain()
        assert not self.boundary and not self.graphs and not self.live, "the schedule left tensors behind"
        self.weight_gradients.assert_empty()

    def _now(self) -> float:
        if self.timed:
            device.synchronize()
        return time.perf_counter()

    def _item(self, item: Item, begun: float) -> None:
        start = self._now()
        if isinstance(item, Pair) and self.plans:
            self._pair(item)
        else:
            for op in parts(item):
                {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}[op.kind](op)
        if self.timed:
            self.spans.append(Span(self.executor.rank, item, start - begun, self._now() - begun))

    def _buffer(self, transfer: Transfer, shapes: list[tuple[int, int, int]]) -> torch.Tensor:
        number = transfer.op.microbatch
        return torch.empty(shapes[number], dtype=self.executor.dtype, device=self.batches[number].tokens_t.device)

    def _forward(self, op: Op) -> None:
        received, batch = self._give_input(op), self.batches[op.microbatch]
        output = self.plans.forward((op.stage, op.microbatch), batch) if self.plans else self.chunks[op.stage](batch)
        self._take_output(op, received, output)

    def _give_input(self, op: Op) -> torch.Tensor | None:
        """Hand a forward's input to its chunk; None on the first stage."""
        if not self.wiring.needs(op):
            return None
        received = self.boundary.pop(op).requires_grad_(torch.is_grad_enabled())
        self._bare(op.stage).set_input_tensor(received)
        return received

    def _bare(self, stage: int) -> torch.nn.Module:
        return getattr(self.chunks[stage], "module", self.chunks[stage])

    def _take_output(self, op: Op, received: torch.Tensor | None, output: torch.Tensor) -> None:
        """Keep what a forward made: for the next stage, or as the loss; and its graph."""
        batch = self.batches[op.microbatch]
        taker = self.wiring.feeds(op)
        if taker is None:
            output, self.results[op.microbatch] = self.loss_fn(output, self._bare(op.stage), batch)
        else:
            assert tuple(output.shape) == self.executor.shape(batch) and output.dtype == self.executor.dtype, (
                f"{op} gave {output.dtype} {tuple(output.shape)}, planned {self.executor.shape(batch)}")
            self.boundary[taker] = output.detach().contiguous()
        if torch.is_grad_enabled():
            key = op.stage, op.microbatch
            if taker is None:  # d loss / d loss
                self.boundary[self.wiring.backward(op)] = torch.ones_like(output)
            self.graphs[key] = received, get_gradient_edge(output)
            self.live.add(key)
            self.peak_live = max(self.peak_live, len(self.live))

    def _backward(self, op: Op) -> None:
        """B or I."""
        key, split = (op.stage, op.microbatch), self.weight_gradients
        received, output = self.graphs.pop(key)
        with self._synchronised(op, self.last_inputs), (
                split.defer(key) if op.kind == "I" else split.at_once(key)):
            if self.plans:
                self.plans.backward(key, output, self.boundary.pop(op))
            else:
                torch.autograd.backward(output, self.boundary.pop(op))
        self._end_backward(op, received)

    def _end_backward(self, op: Op, received: torch.Tensor | None) -> None:
        if op.kind == "B":
            self.live.remove((op.stage, op.microbatch))
        taker = self.wiring.feeds(op)
        if taker:
            self.boundary[taker] = received.grad.contiguous()

    def _pair(self, item: Pair) -> None:
        """F and B at the same time."""
        ahead, back = item.forward, item.backward
        given, key = self._give_input(ahead), (back.stage, back.microbatch)
        received, output = self.graphs.pop(key)
        with self._synchronised(back, self.last_inputs):
            hidden = self.plans.pair((ahead.stage, ahead.microbatch), self.batches[ahead.microbatch], key, output,
                                     self.boundary.pop(back))
        self._take_output(ahead, given, hidden)
        self._end_backward(back, received)

    def _weights(self, op: Op) -> None:
        key = op.stage, op.microbatch
        with self._synchronised(op, self.last_weights):
            self.weight_gradients.run(key)
        self.live.remove(key)

    def _synchronised(self, op: Op, last: dict[int, Op]) -> AbstractContextManager[None]:
        """`no_sync` of the chunk, unless this operation completes those gradients whose `last` one it is."""
        chunk = self.chunks[op.stage]
        return nullcontext() if last[op.stage] == op or not hasattr(chunk, "no_sync") else chunk.no_sync()
