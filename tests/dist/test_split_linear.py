"""Split backward on real chunks of two ranks: against Megatron's own linears, counted, weighed, and under its DDP."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from worlds import run_world

from megarl.config.layout import Layout

LENGTHS = ([7, 4, 5], [2], [12, 4], [3, 9])  # of the sequences of each micro-batch
CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "dense, bias, TP2": (Layout(2, tensor=2), "qwen2", {}),
    "dense, TP2 + SP": (Layout(2, tensor=2, sequence=True), "qwen3", {}),
    "dense, TP2 + SP, recompute": (Layout(2, tensor=2, sequence=True), "qwen3", dict(recompute="full")),
    "dense, bf16": (Layout(2), "qwen2", dict(dtype="bf16")),
    "MoE, EP2": (Layout(2, expert=2), "qwen3_moe", {}),
    "MoE, TP2 + SP, ETP2": (Layout(2, tensor=2, sequence=True, expert_tensor=2), "qwen3_moe", {}),
    "MoE, TP2 + SP, EP2": (Layout(2, tensor=2, sequence=True, expert=2), "qwen3_moe", {}),
    "MoE, EP2, recompute": (Layout(2, expert=2), "qwen3_moe", dict(recompute="full")),
}


class Calls(TorchDispatchMode):
    """Collectives by name, and what is left of the memory that operations made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.collectives[func.overloadpacket.__name__.strip("_")] += 1
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs))
                 if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes that are still held."""
        gc.collect()
        return sum(size for ref, size in self.made.values() if not ref.expired())


@contextlib.contextmanager
def stock_linears() -> Iterator[None]:
    """Chunks built in this block have Megatron-core's own linears."""
    from megatron.core.tensor_parallel import layers

    from megarl.model import specs

    ours = specs.ColumnParallelLinear, specs.RowParallelLinear
    specs.ColumnParallelLinear, specs.RowParallelLinear = layers.ColumnParallelLinear, layers.RowParallelLinear
    try:
        yield
    finally:
        specs.ColumnParallelLinear, specs.RowParallelLinear = ours


def chunk_of(folder: Path, family: str, layout: Layout, options: dict[str, Any]) -> Any:
    from megarl.checkpoint.hf_import import load_hf
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    hf = HFConfig.read(folder / family)
    chunks = build_chunks(hf, models.config_for(folder / family, balance=dict(coefficient=0.1), **options), layout)
    load_hf(chunks, folder / family, hf)
    if chunks[0].routers is not None:
        chunks[0].routers.set_step(torch.full((hf.layers, hf.experts), 1 / hf.experts), 100)
    return chunks[0]


def losses(chunk: Any, layout: Layout) -> list[Callable[[], torch.Tensor]]:
    """For each micro-batch its forward, up to a scalar. Data-parallel ranks get other tokens."""
    from megatron.core import parallel_state

    dp, made = parallel_state.get_data_parallel_rank(), []
    for lengths in LENGTHS:
        generator = torch.Generator().manual_seed(sum(lengths) + 100 * dp)
        tokens = [torch.randint(2, 99, (n,), generator=generator).tolist() for n in lengths]
        batch = models.pack(tokens, total=-(-sum(lengths) // layout.pack_multiple) * layout.pack_multiple)
        weights = torch.randn(len(batch.tokens_t), 1, chunk.config.hidden_size, generator=generator)
        if layout.sequence:
            weights = weights.chunk(2)[parallel_state.get_tensor_model_parallel_rank()]

        def forward(chunk: Any = chunk, batch: Any = batch, weights: Any = weights) -> torch.Tensor:
            bare = getattr(chunk, "module", chunk)
            return (bare(batch).float() * weights).sum() + bare.head_weight().float().square().sum()

        made.append(forward)
    return made


def gradients(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "main_grad", p.grad).clone() for name, p in chunk.named_parameters() if p.requires_grad
            and getattr(p, "main_grad", p.grad) is not None}


def compare(folder: Path, layout: Layout, family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Gradients of all micro-batches by Megatron's linears and by ours; then what one more backward costs."""
    from megarl.pipeline.split import weight_gradients

    found: dict[str, Any] = {}
    with stock_linears():
        chunk = chunk_of(folder, family, layout, options)
    for forward in losses(chunk, layout):
        forward().backward()
    found["stock"] = gradients(chunk)
    found["B"] = cost(losses(chunk, layout)[0]().backward)

    chunk = chunk_of(folder, family, layout, options)
    for forward in losses(chunk, layout):  # without a store
        forward().backward()
    found["whole"] = gradients(chunk)

    chunk.zero_grad()
    store = weight_gradients({0: chunk}, "local")
    graphs = [forward() for forward in losses(chunk, layout)]  # all in flight
    for number, loss in enumerate(graphs):
        backward_input(store, number, loss)
    for number in range(len(graphs)):
        store.run((0, number))
    store.assert_empty()
    found["split"] = gradients(chunk)

    chunk.zero_grad()
    for number, forward in enumerate(losses(chunk, layout)):
        backward_input(store, number, forward())
    for number in (2, 0, 3, 1):  # keyed, not FIFO
        store.run((0, number))
    found["disorder"] = gradients(chunk)

    loss = losses(chunk, layout)[0]()
    found["I"], found["W"] = cost(lambda: backward_input(store, 0, loss)), cost(lambda: store.run((0, 0)))
    found["weights"] = sum(p.numel() for m in chunk.modules() if hasattr(m, "weight_gradients") for p in [m.weight])
    if chunk.routers is not None:
        chunk.routers.reset()
        chunk.routers.counting = True
        losses(chunk, layout)[1]()
        found["tokens"] = chunk.routers.counts
    return found


def cost(run: Callable[[], Any]) -> tuple[int, Counter[str]]:
    """FLOPs and collectives. (Counting decomposes operations, which changes how they round.)"""
    flops, calls = FlopCounterMode(display=False), Calls()
    with flops, calls:
        run()
    return flops.get_total_flops(), calls.collectives


def backward_input(store: Any, number: int, loss: torch.Tensor) -> None:
    with store.defer((0, number)):
        loss.backward()


def memory(folder: Path, layout: Layout) -> dict[str, int]:
    """Bytes alive after F, I and W of a micro-batch, beside .grad; and what x and gradients of y take."""
    from megarl.pipeline.split import weight_gradients

    chunk = chunk_of(folder, "llama", layout, {})
    store, calls, expected = weight_gradients({0: chunk}, "local"), Calls(), 0

    def add(module: Any, args: Any, output: Any) -> None:
        nonlocal expected
        expected += 4 * (args[0].numel() + output[0].numel())

    for module in chunk.modules():
        if hasattr(module, "weight_gradients"):
            module.register_forward_hook(add)
    forward = losses(chunk, layout)[0]
    forward().backward()  # makes .grad, which stays
    expected, found = 0, {}
    others = nodes()
    with calls:
        loss = forward()
        found["F"], found["nodes before"] = calls.alive(), nodes() - others
        backward_input(store, 0, loss)
        del loss
        found["I"], found["nodes"] = calls.alive(), nodes() - others
        store.run((0, 0))
        found["W"] = calls.alive()
    return found | {"x and gradients of y": expected}


def nodes() -> int:
    """Nodes of linears that are still held in some graph."""
    return sum(type(thing).__name__ == "_LinearBackward" for thing in gc.get_objects())


def under_ddp(folder: Path, layout: Layout, family: str, overlap: bool, distributed: bool, lag: int,
              delay: bool = True) -> dict[str, Any]:
    """Two steps in Megatron's DDP with W `lag` micro-batches after I, against stock linears in a plain DDP.

    All but the last I and the last W are under no_sync, as in the executor.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megarl.pipeline.split import weight_gradients

    def wrapped(**options: Any) -> Any:
        chunk = chunk_of(folder, family, layout, {})
        return DistributedDataParallel(chunk.config, DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, **options), chunk)

    with stock_linears():
        plain = wrapped(overlap_grad_reduce=False)
    with plain.no_sync():
        for forward in losses(plain, layout):
            forward().backward()
    finalize_model_grads([plain])
    ddp = wrapped(overlap_grad_reduce=overlap, delay_wgrad_compute=delay)
    store, last = weight_gradients({0: ddp}, "local"), len(LENGTHS) - 1
    found: dict[str, Any] = {"plain": gradients(plain.module), "steps": []}
    for _ in range(2):
        ddp.zero_grad_buffer()
        reduced: list[tuple[str, int]] = []

        def run(kind: str, number: int, what: Callable[[], None], reduced: Any = reduced) -> None:
            calls = Calls()
            with contextlib.nullcontext() if number == last else ddp.no_sync(), calls:
                what()
            if any("reduce" in name for name in calls.collectives):
                reduced.append((kind, number))

        graphs = [forward() for forward in losses(ddp, layout)]
        for number in range(last + 1 + lag):
            if number <= last:
                run("I", number, lambda n=number, loss=graphs[number]: backward_input(store, n, loss))
            if number >= lag:
                run("W", number - lag, lambda n=number - lag: store.run((0, n)))
        store.assert_empty()
        finalize_model_grads([ddp])
        found["steps"].append((reduced, gradients(ddp.module)))
    return found


def whole_under_ddp(folder: Path, layout: Layout, delay: bool) -> bool:
    """Full backwards of our linears, under either DDP config, equal stock ones to the bit."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    results = []
    for stock in (True, False):
        with stock_linears() if stock else contextlib.nullcontext():
            chunk = chunk_of(folder, "qwen2", layout, dict(dtype="bf16"))
        ddp = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, delay_wgrad_compute=delay and not stock), chunk)
        for number, forward in enumerate(losses(ddp, layout)):
            with contextlib.nullcontext() if number == len(LENGTHS) - 1 else ddp.no_sync():
                forward().backward()
        finalize_model_grads([ddp])
        results.append(gradients(ddp.module))
    return all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())


def frozen(folder: Path, layout: Layout) -> bool:
    """A weight that is not trained, and a forward without gradients, leave nothing behind and change nothing else."""
    from megarl.pipeline.split import weight_gradients

    results, untouched = [], True
    for stock in (True, False):
        with stock_linears() if stock else contextlib.nullcontext():
            chunk = chunk_of(folder, "llama", layout, {})
        weight = chunk.decoder.layers[1].mlp.linear_fc1.weight.requires_grad_(False)
        store = weight_gradients({0: chunk}, "local")
        for number, forward in enumerate(losses(chunk, layout)):
            with torch.no_grad():
                forward()
            if stock:
                forward().backward()
            else:
                backward_input(store, number, forward())
                store.run((0, number))
        results.append(gradients(chunk))
        untouched &= weight.grad is None
    return untouched and results[0].keys() == results[1].keys() and all(
        torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def changed_between(folder: Path, layout: Layout) -> str:
    """The gradient of an output is overwritten after I: what W says."""
    from megarl.pipeline.split import weight_gradients

    chunk = chunk_of(folder, "llama", layout, {})
    store, seen = weight_gradients({0: chunk}, "local"), []
    chunk.decoder.layers[1].mlp.linear_fc2.register_full_backward_hook(lambda m, gx, gy: seen.append(gy[0]))
    backward_input(store, 0, losses(chunk, layout)[0]())
    seen[0].mul_(2)
    try:
        store.run((0, 0))
    except RuntimeError as error:
        return str(error)
    return ""


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    path, found = Path(folder), {}
    todo: list[tuple[Any, Layout, Callable[[Layout], Any]]] = [
        (name, layout, lambda layout, f=family, o=options: compare(path, layout, f, o))
        for name, (layout, family, options) in CASES.items()]
    todo += [(("ddp", family, overlap, distributed), layout,
              lambda layout, f=family, o=overlap, d=distributed: under_ddp(path, layout, f, o, d, lag=2))
             for family, layout in (("qwen2", Layout(2)), ("qwen3_moe", Layout(2, expert=2)))
             for overlap in (False, True) for distributed in (False, True)]
    todo += [("ddp without delay", Layout(2),
              lambda layout: under_ddp(path, layout, "qwen2", False, False, lag=2, delay=False))]
    todo += [(("whole", delay), Layout(2), lambda layout, d=delay: whole_under_ddp(path, layout, d))
             for delay in (False, True)]
    todo += [("memory", Layout(2), lambda layout: memory(path, layout)),
             ("frozen", Layout(2), lambda layout: frozen(path, layout)),
             ("changed", Layout(2), lambda layout: changed_between(path, layout))]
    for name, layout, what in todo:
        make_groups(layout, datetime.timedelta(seconds=100), seed=1)
        found[name] = what(layout)
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("split")
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        models.save_hf_model(family, folder / family)
    return run_world(2, on_ranks, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_stock(world: list[dict[str, Any]], case: str) -> None:
    """To the bit, for W in the order of I; out of order the sums over micro-batches round otherwise."""
    for found in (result[case] for result in world):
        for kind in ("whole", "split"):
            assert found[kind].keys() == found["stock"].keys()
            wrong = [name for name, tensor in found["stock"].items() if not torch.equal(found[kind][name], tensor)]
            assert not wrong, f"{kind}: {wrong}"
        rtol = 2e-2 if "bf16" in case else 1e-5
        for name, tensor in found["stock"].items():
            bound = rtol * float(tensor.abs().max())
            torch.testing.assert_close(found["disorder"][name], tensor, rtol=rtol, atol=bound)


def test_experts_without_tokens(world: list[dict[str, Any]]) -> None:
    """The second micro-batch has two tokens a data-parallel rank; somewhere an expert had none of the step's."""
    counts = sum(result["MoE, EP2"]["tokens"] for result in world)
    assert (counts == 0).any(dim=1).all()


@pytest.mark.parametrize("case", CASES)
def test_flops(world: list[dict[str, Any]], case: str) -> None:
    """(I + W) / B == 1, and W is one product with each weight."""
    layout, tokens = CASES[case][0], sum(LENGTHS[0])
    for found in (result[case] for result in world):
        (b, _), (i, _), (w, _) = (found[kind] for kind in "BIW")
        assert i + w == b
        if "MoE" not in case:
            assert tokens % layout.pack_multiple == 0 and w == 2 * tokens * found["weights"]
        assert 0 < w <= i


@pytest.mark.parametrize("case", CASES)
def test_collectives(world: list[dict[str, Any]], case: str) -> None:
    """W has none but the gathers of x under sequence parallelism, and those are not in I."""
    layers = 4
    for found in (result[case] for result in world):
        (_, b), (_, i), (_, w) = (found[kind] for kind in "BIW")
        gathers = 0
        if "SP" in case:
            gathers = layers if "MoE" in case else 2 * layers  # qkv; fc1 of dense layers
        assert w == Counter({"allgather_base": gathers} if gathers else {}), w
        assert i + w == b
        if "TP2" in case:
            assert i["allreduce"] or i["reduce_scatter_base"]


def test_memory_between_i_and_w(world: list[dict[str, Any]]) -> None:
    """x and the gradient of y of each linear, and nothing else; nothing after W."""
    for found in (result["memory"] for result in world):
        assert found["I"] == found["x and gradients of y"]
        assert found["W"] == 0
        assert found["F"] > found["I"]
        assert found["nodes before"] == 4 * 4 and found["nodes"] == 0


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_ddp_reduces_at_the_last_w(world: list[dict[str, Any]], family: str, overlap: bool, distributed: bool) -> None:
    last = len(LENGTHS) - 1
    for found in (result["ddp", family, overlap, distributed] for result in world):
        (first, _), (second, _) = found["steps"]
        assert first == []  # DDP learns in its first step which parameters to wait for
        assert second == ([("W", last)] if overlap else [])
        check_steps(found)


def check_steps(found: dict[str, Any]) -> None:
    for _, grads in found["steps"]:
        assert grads.keys() == found["plain"].keys()
        wrong = [name for name, tensor in found["plain"].items() if not torch.equal(grads[name], tensor)]
        assert not wrong, wrong


def test_ddp_that_knows_of_no_delay(world: list[dict[str, Any]]) -> None:
    for result in world:
        check_steps(result["ddp without delay"])


@pytest.mark.parametrize("delay", [False, True])
def test_full_backward_under_ddp(world: list[dict[str, Any]], delay: bool) -> None:
    assert all(result["whole", delay] for result in world)


def test_frozen_weights(world: list[dict[str, Any]]) -> None:
    assert all(result["frozen"] for result in world)


def test_a_tensor_changed_between_i_and_w(world: list[dict[str, Any]]) -> None:
    assert all("changed in place between I and W" in result["changed"] for result in world)
