"""The executor on a toy chunk in fp64, all schedules: gradients, results, order, live activations, synchronisation."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from worlds import run_world

from megarl.config.layout import Layout
from megarl.pipeline.check import check
from megarl.pipeline.execute import Executor
from megarl.pipeline.generators import fitting

HIDDEN, VOCAB, LAYERS = 8, 11, 8
LENGTHS = (7, 3, 12, 5, 1, 9, 4, 10)
PLACEMENTS = {"gpipe": ("looped", 1), "1f1b": ("looped", 1), "zb-h1": ("looped", 1), "interleaved": ("looped", 2),
              "zb-v": ("v", 2), "dualpipev": ("v", 2), "dualpipe": ("mirrored", 2)}


class Product(torch.autograd.Function):
    """x w^T, whose weight gradient can wait."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Linear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (x, weight), layer = ctx.saved_tensors, ctx.layer

        def compute() -> None:
            gradient = torch.einsum("tbo,tbi->oi", grad, x)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            layer.synchronised += layer.sync

        waits = layer.weight_gradients is not None and layer.weight_gradients.deferring
        layer.weight_gradients.collect(compute) if waits else compute()
        return grad @ weight, None, None


class Linear(torch.nn.Module):
    """A linear layer without bias; counts the gradients that it got outside `no_sync`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64) / HIDDEN)
        self.weight_gradients, self.sync, self.synchronised = None, True, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self)


class Toy(torch.nn.Module):
    """Layers [first, last) of a small network with the interface of a policy chunk; biases get their gradient in I."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        embedding = torch.nn.Embedding(VOCAB, HIDDEN).double()
        layers = [Linear() for _ in range(LAYERS)]
        biases = [torch.nn.Parameter(torch.randn(HIDDEN, dtype=torch.float64)) for _ in range(LAYERS)]
        head = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
        self.layers = torch.nn.ModuleDict({str(n): layers[n] for n in range(first, last)})
        self.biases = torch.nn.ParameterDict({str(n): biases[n] for n in range(first, last)})
        self.embedding = embedding if first == 0 else None
        self.head = head if last == LAYERS else None
        self.input = None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.input = tensor

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        hidden = self.embedding(batch.tokens_t)[:, None] if self.embedding is not None else self.input
        for name, layer in self.layers.items():
            hidden = hidden + torch.tanh(layer(hidden) + self.biases[name])
        return hidden


class Wrapped(torch.nn.Module):
    """As Megatron-core's DDP for the executor: gradients within `no_sync` are not to be reduced yet."""

    def __init__(self, module: Toy) -> None:
        super().__init__()
        self.module = module

    @contextlib.contextmanager
    def no_sync(self):
        for layer in self.module.layers.values():
            layer.sync = False
        yield
        for layer in self.module.layers.values():
            layer.sync = True

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return self.module(batch)


def loss_fn(hidden: torch.Tensor, chunk: Toy, batch: SimpleNamespace) -> tuple[torch.Tensor, dict]:
    logprobs = torch.log_softmax(hidden[:, 0] @ chunk.head.T, dim=-1)
    loss = -logprobs.gather(1, batch.labels_t[:, None]).sum() / sum(LENGTHS)
    return loss, {"loss": loss.detach(), "tokens": torch.tensor(len(batch.tokens_t))}


def batches(count: int = len(LENGTHS)) -> list[SimpleNamespace]:
    generator = torch.Generator().manual_seed(5)
    return [SimpleNamespace(tokens_t=torch.randint(VOCAB, (n,), generator=generator),
                            labels_t=torch.randint(VOCAB, (n,), generator=generator)) for n in LENGTHS][:count]


def reference(count: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    model, losses = Toy(0, LAYERS), []
    for batch in batches(count):
        loss, _ = loss_fn(model(batch), model, batch)
        loss.backward()
        losses.append(loss.detach())
    return {name: p.grad for name, p in model.named_parameters()}, losses


def pipeline(rank: int, size: int, name: str, count: int) -> dict:
    """What this rank found out in a pipeline of `size` ranks; gradients of mirrored ranks are not added here."""
    placement, chunks = PLACEMENTS[name] if size > 1 else ("looped", 1)
    layout = Layout(world=size, pipeline=size, placement=placement, chunks=chunks)
    here, share = rank % size, LAYERS // layout.stages
    held = [stage for stage, holders in enumerate(layout.placement_table) if here in holders]
    made = [Wrapped(Toy(stage * share, (stage + 1) * share)) for stage in held]
    members = list(range(rank - here, rank - here + size)) if size > 1 else ()
    executor = Executor(made, layout, HIDDEN, torch.float64, members, 60.0)
    given = batches(count)
    results = executor.train(given, loss_fn, name, timed=True)
    grads = {n: p.grad.clone() for chunk in made for n, p in chunk.module.named_parameters()}
    forward = executor.forward(given, lambda hidden, c, batch: loss_fn(hidden, c, batch)[0], name)
    schedule, _ = fitting(name, size, count, chunks)
    return {"schedule": schedule.name, "grads": grads, "peak": executor.peak_live,
            "expected_peak": check(schedule).peak_live[here],
            "in_order": [span.item for span in executor.spans] == list(schedule.items[here]),
            "times": all(a.start < a.end <= b.start for a, b in zip(executor.spans, executor.spans[1:], strict=False)),
            "with_grad": any(result is not None and result.requires_grad for result in forward),
            "losses": {n: (float(r["loss"]), int(r["tokens"]), float(f)) for n, (r, f) in
                       enumerate(zip(results, forward, strict=True)) if r is not None},
            "synchronised": [[layer.synchronised for layer in chunk.module.layers.values()] for chunk in made]}


def many_pipelines(rank: int) -> dict:
    found = {}
    for size in (1, 2, 4):
        for name in PLACEMENTS if size > 1 else ("gpipe", "1f1b"):
            for count in (len(LENGTHS), 3):
                found[size, name, count] = pipeline(rank, size, name, count)
    executor = Executor([Toy(4 * (rank % 2), 4 * (rank % 2) + 4)], Layout(2, pipeline=2), HIDDEN, torch.float64,
                        [rank // 2 * 2, rank // 2 * 2 + 1])
    try:
        executor.train(batches()[rank % 2:3 + rank % 2], loss_fn)
    except RuntimeError as error:
        found["refused"] = str(error)
    dist.barrier()
    return found


def test_every_schedule_equals_a_single_process():
    worlds = run_world(4, many_pipelines)
    assert all("plan different shapes" in found.pop("refused") for found in worlds)
    expected = {count: reference(count) for count in (len(LENGTHS), 3)}
    for size, name, count in worlds[0]:
        case = f"{name} on {size} ranks, {count} micro-batches"
        grads, losses = expected[count]
        for first in range(0, 4, size):
            ranks = [found[size, name, count] for found in worlds[first:first + size]]
            assert len({found["schedule"] for found in ranks}) == 1
            total: dict[str, torch.Tensor] = {}
            for found in ranks:
                for parameter, grad in found["grads"].items():
                    total[parameter] = total.get(parameter, 0) + grad
                assert found["peak"] == found["expected_peak"], case
                assert found["in_order"] and found["times"] and not found["with_grad"], case
                assert all(layer == 1 for chunk in found["synchronised"] for layer in chunk), case
            worst = max(float((total[parameter] - grad).abs().max()) for parameter, grad in grads.items())
            assert total.keys() == grads.keys() and worst <= 1e-12, (case, worst)
            told = {n: values for found in ranks for n, values in found["losses"].items()}
            assert told == {n: (float(loss), length, float(loss)) for n, (loss, length) in
                            enumerate(zip(losses, LENGTHS[:count], strict=False))}, case
