"""F&B by Megatron's chunk plans against plain forwards and backwards, on CPU: its streams do nothing there.

Two expert-parallel ranks, both stages of the model on each. Shows the gradients and the order of things, not that
anything is hidden.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from worlds import run_world

from megarl.config.layout import Layout

LENGTHS = ([7, 4], [2], [9, 4, 3])  # of the sequences of each micro-batch
TOTAL = 20  # tokens of each pack, the rest is padding
LAYOUTS = {"EP2": Layout(2, expert=2, placement="v", chunks=2),
           "TP2 + SP, EP2": Layout(2, tensor=2, sequence=True, expert=2, placement="v", chunks=2)}


def chunks_of(path: Path, layout: Layout, where: str, **options: Any) -> dict[int, Any]:
    """Both stages, in Megatron's DDP; no gradients yet. Transformer Engine's layers delay their weight gradients."""
    from megarl.checkpoint.hf_import import load_hf
    from megarl.model import build
    from megarl.model.hf_config import HFConfig
    from megarl.update.optimizer import wrap

    def delaying(*args: Any) -> Any:
        config = plain(*args)
        config.delay_wgrad_compute = options["implementation"] == "transformer_engine"
        return config

    hf, plain = HFConfig.read(path), build.transformer_config
    build.transformer_config = delaying
    chunks = build.build_chunks(hf, models.config_for(path, balance=dict(coefficient=0.1, z_loss=0.1), **options),
                                layout)
    build.transformer_config = plain
    load_hf(chunks, path, hf)
    for chunk in chunks:
        chunk.routers.set_step(torch.full(chunk.routers.counts.shape, 1 / hf.experts, device=where), 50)
    return dict(enumerate(wrap(chunks, distributed=False)))


def batches(where: str) -> list[Any]:
    from megatron.core import parallel_state

    made = []
    for lengths in LENGTHS:
        generator = torch.Generator().manual_seed(sum(lengths) + 100 * parallel_state.get_data_parallel_rank())
        batch = models.pack([torch.randint(2, 99, (n,), generator=generator).tolist() for n in lengths], total=TOTAL)
        for key in ("tokens_t", "positions_t", "padding_t"):
            setattr(batch, key, getattr(batch, key).to(where))
        made.append(batch)
    return made


class Run:
    """What the executor does with a chunk, for F, B, I, W and pairs of both stages on this rank."""

    def __init__(self, chunks: dict[int, Any], where: str, implementation: str, planned: bool) -> None:
        from megarl.pipeline.gpu_pair import ChunkPlans
        from megarl.pipeline.split import weight_gradients

        self.chunks, self.batches = chunks, batches(where)
        self.store = weight_gradients(chunks, implementation)
        self.plans = ChunkPlans(chunks, self.store) if planned else None
        self.received: dict[Any, torch.Tensor] = {}
        self.graphs: dict[Any, Any] = {}
        self.grads: dict[Any, torch.Tensor] = {}
        self.outputs: list[torch.Tensor] = []

    def _take(self, stage: int, number: int) -> None:
        if stage == 1:
            self.chunks[1].module.set_input_tensor(self.received[1, number])

    def _give(self, stage: int, number: int, hidden: torch.Tensor) -> None:
        self.outputs.append(hidden.detach().clone())
        output = hidden
        if stage == 0:
            self.received[1, number] = hidden.detach().contiguous().requires_grad_()
        else:
            output = (hidden[:, 0].float() @ self.chunks[1].module.head_weight().float().T).square().mean()
            self.grads[1, number] = torch.ones_like(output)
        self.graphs[stage, number] = get_gradient_edge(output)

    def _after(self, stage: int, number: int) -> None:
        if stage == 1:
            self.grads[0, number] = self.received.pop((1, number)).grad.contiguous()

    def forward(self, stage: int, number: int) -> None:
        self._take(stage, number)
        batch = self.batches[number]
        self._give(stage, number, self.plans.forward((stage, number), batch) if self.plans
                   else self.chunks[stage](batch))

    def backward(self, stage: int, number: int, split: bool = False) -> None:
        key = stage, number
        edge, grad = self.graphs.pop(key), self.grads.pop(key)
        with self.store.defer(key) if split else self.store.at_once(key):
            if self.plans:
                self.plans.backward(key, edge, grad)
            else:
                torch.autograd.backward(edge, grad)
        self._after(*key)

    def pair(self, stage: int, number: int, other: int, other_number: int) -> None:
        if not self.plans:
            self.forward(stage, number)
            self.backward(other, other_number)
            return
        self._take(stage, number)
        key = other, other_number
        hidden = self.plans.pair((stage, number), self.batches[number], key, self.graphs.pop(key), self.grads.pop(key))
        self._after(*key)
        self._give(stage, number, hidden)


def gradients(path: Path, layout: Layout, where: str, implementation: str, planned: bool, **options: Any
              ) -> dict[str, Any]:
    """A walk with pairs of other and of the same stage, lone B's, and I's."""
    from megatron.core.distributed import finalize_model_grads

    chunks = chunks_of(path, layout, where, implementation=implementation, **options)
    head_calls: list[int] = []
    chunks[1].module.output_layer.register_forward_hook(lambda *_: head_calls.append(1))
    run = Run(chunks, where, implementation, planned)
    with chunks[0].no_sync(), chunks[1].no_sync():
        run.forward(0, 0)
        run.forward(1, 0)
        run.forward(0, 1)
        run.pair(1, 1, 1, 0)  # the same stage
        run.pair(0, 2, 1, 1)  # other stages: the one has no final norm, the other the embedding
        run.backward(0, 0)
        run.forward(1, 2)
        run.backward(1, 2, split=True)
        run.backward(0, 1, split=True)
        run.store.run((1, 2))
        run.backward(0, 2, split=True)
        run.store.run((0, 1))
        run.store.run((0, 2))
    run.store.assert_empty()
    finalize_model_grads(list(chunks.values()))
    grads = {f"{stage}.{name}": p.main_grad.cpu().clone() for stage, chunk in chunks.items()
             for name, p in chunk.module.named_parameters()}
    losses = [float(x) for chunk in chunks.values() for x in (chunk.module.routers.balance, chunk.module.routers.z)]
    return {"grads": grads, "outputs": [x.cpu() for x in run.outputs], "losses": losses, "head": len(head_calls)}


def both(rank: int, folder: str, layout: Layout, where: str, implementation: str, options: dict[str, Any]
         ) -> list[dict[str, Any]]:
    """Sequential, then paired."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    if where == "cpu":
        torch.Tensor.record_stream = lambda *_: None  # not for this device
    make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    found = [gradients(Path(folder), layout, where, implementation, planned, **options) for planned in (False, True)]
    parallel_state.destroy_model_parallel()
    return found


def obstacles(rank: int, folder: str) -> list[str]:
    """Of the chunk as it is, then with one thing after another as it should not be."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups
    from megarl.pipeline.gpu_pair import obstacle

    make_groups(LAYOUTS["EP2"], datetime.timedelta(seconds=100), seed=1)
    ddp = chunks_of(Path(folder), LAYOUTS["EP2"], "cpu", implementation="local")[1]
    found, bare = [obstacle(ddp)], ddp.module
    bare.implementation = "transformer_engine"
    found.append(obstacle(ddp))
    for where, name, value in ((bare.config, "recompute_granularity", "full"),
                               (bare.decoder.layers[0].mlp, "num_local_experts", 1),
                               (bare.decoder.layers[1], "mlp", torch.nn.Identity()),
                               (bare.config, "moe_token_dispatcher_type", "allgather"),
                               (bare.config, "expert_model_parallel_size", 1)):
        setattr(where, name, value)
        found.append(obstacle(ddp))
    parallel_state.destroy_model_parallel()
    return found


def test_obstacles(tmp_path: Path) -> None:
    models.save_hf_model("qwen3_moe", tmp_path)
    for local, none, recompute, one_expert, dense, dispatcher, no_expert in run_world(2, obstacles, str(tmp_path)):
        assert none == "" and "Transformer Engine" in local and "recompute" in recompute
        assert "one expert a rank" in one_expert and "dense" in dense and "allgather" in dispatcher
        assert "no expert parallelism" in no_expert


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_equal_sequence(name: str, tmp_path: Path) -> None:
    models.save_hf_model("qwen3_moe", tmp_path)
    for plain, paired in run_world(2, both, str(tmp_path), LAYOUTS[name], "cpu", "local", {}):
        assert paired["head"] == 0  # no full logits
        assert paired["losses"] == plain["losses"]
        for one, other in zip(plain["outputs"], paired["outputs"], strict=True):
            assert torch.equal(one, other)
        assert plain["grads"].keys() == paired["grads"].keys()
        wrong = {key: float((tensor - paired["grads"][key]).abs().max()) for key, tensor in plain["grads"].items()
                 if not torch.equal(tensor, paired["grads"][key])}
        assert not wrong, wrong
