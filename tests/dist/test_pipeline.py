"""The executor on a toy chunk in fp64: gradients, results and live activations against a single process."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from worlds import run_world

from megarl.config.layout import Layout
from megarl.pipeline.execute import Executor
from megarl.pipeline.schedule import GENERATORS

HIDDEN, VOCAB, LAYERS = 8, 11, 4
LENGTHS = (7, 3, 12, 5, 1, 9)


class Toy(torch.nn.Module):
    """Layers [first, last) of a small network with the interface of a policy chunk."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        embedding = torch.nn.Embedding(VOCAB, HIDDEN).double()
        layers = [torch.nn.Linear(HIDDEN, HIDDEN).double() for _ in range(LAYERS)]
        head = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
        self.layers = torch.nn.ModuleDict({str(n): layers[n] for n in range(first, last)})
        self.embedding = embedding if first == 0 else None
        self.head = head if last == LAYERS else None
        self.input = None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.input = tensor

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        hidden = self.embedding(batch.tokens_t)[:, None] if self.embedding is not None else self.input
        for layer in self.layers.values():
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Wrapped(torch.nn.Module):
    """As Megatron-core's DDP for the executor: records which backwards ran outside `no_sync`."""

    def __init__(self, module: Toy) -> None:
        super().__init__()
        self.module, self.synchronised, self._sync = module, 0, True
        next(module.parameters()).register_post_accumulate_grad_hook(self._count)

    def _count(self, _: torch.Tensor) -> None:
        self.synchronised += self._sync

    @contextlib.contextmanager
    def no_sync(self):
        self._sync = False
        yield
        self._sync = True

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return self.module(batch)


def loss_fn(hidden: torch.Tensor, chunk: Toy, batch: SimpleNamespace) -> tuple[torch.Tensor, dict]:
    logprobs = torch.log_softmax(hidden[:, 0] @ chunk.head.T, dim=-1)
    loss = -logprobs.gather(1, batch.labels_t[:, None]).sum() / sum(LENGTHS)
    return loss, {"loss": loss.detach(), "tokens": torch.tensor(len(batch.tokens_t))}


def batches() -> list[SimpleNamespace]:
    generator = torch.Generator().manual_seed(5)
    return [SimpleNamespace(tokens_t=torch.randint(VOCAB, (n,), generator=generator),
                            labels_t=torch.randint(VOCAB, (n,), generator=generator)) for n in LENGTHS]


def reference() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    model, losses = Toy(0, LAYERS), []
    for batch in batches():
        loss, _ = loss_fn(model(batch), model, batch)
        loss.backward()
        losses.append(loss.detach())
    return {name: p.grad for name, p in model.named_parameters()}, losses


def pipeline(rank: int, size: int, schedule: str, group: dist.ProcessGroup | None) -> dict:
    """Everything that this rank found out in a pipeline of `size` ranks, against the single process."""
    stage, share = rank % size, LAYERS // size
    chunk = Wrapped(Toy(stage * share, (stage + 1) * share))
    executor = Executor([chunk], Layout(world=size, pipeline=size), HIDDEN, torch.float64, group, schedule, 60.0)
    closed = []
    results = executor.train(batches(), loss_fn, on_last_backward=closed.append)
    grads, losses = reference()
    worst = max(float((p.grad - grads[name]).abs().max()) for name, p in chunk.module.named_parameters())
    peak = executor.peak_live
    forward = executor.forward(batches(), lambda hidden, c, batch: loss_fn(hidden, c, batch)[0])
    with_grad = any(result is not None and result.requires_grad for result in forward)
    same = None
    if stage == size - 1:
        same = all(torch.equal(r["loss"], loss) and r["tokens"] == n and torch.equal(f, loss)
                   for r, f, loss, n in zip(results, forward, losses, LENGTHS, strict=True))
    else:
        assert results == forward == [None] * len(LENGTHS)
    return {"worst": worst, "peak": peak, "same": same, "synchronised": chunk.synchronised, "with_grad": with_grad,
            "closed": closed == [chunk]}


def many_pipelines(rank: int) -> dict:
    found = {}
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, 4, size)]
        for schedule in GENERATORS:
            found[size, schedule] = pipeline(rank, size, schedule, groups[rank // size] if size > 1 else None)
    pairs, stage = [dist.new_group([0, 1]), dist.new_group([2, 3])], rank % 2
    executor = Executor([Toy(2 * stage, 2 * stage + 2)], Layout(2, pipeline=2), HIDDEN, torch.float64, pairs[rank // 2])
    try:
        executor.train(batches()[stage:3 + stage], loss_fn)
    except RuntimeError as error:
        found["refused"] = str(error)
    return found


def test_gradients_equal_a_single_process_exactly():
    for rank, found in enumerate(run_world(4, many_pipelines)):
        assert "plan different shapes" in found.pop("refused")
        for (size, schedule), result in found.items():
            stage, count = rank % size, len(LENGTHS)
            assert result["worst"] == 0.0, (rank, size, schedule)
            assert result["peak"] == (count if schedule == "gpipe" else min(size - stage, count))
            assert result["same"] is (True if stage == size - 1 else None)
            assert result["synchronised"] == 1 and result["closed"] and not result["with_grad"]
