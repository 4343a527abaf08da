"""What the model promises beside parity: the router's losses by hand, padding, recompute, replay, reference weights."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from worlds import run_world

SEQUENCES = [[int(t) for t in torch.randint(2, 99, (n,), generator=torch.Generator().manual_seed(n))]
             for n in (5, 17, 30, 8)]


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    """All checks on two data-parallel ranks; those that need no second rank run alike on both."""
    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout

    layout = Layout(world=2)
    make_groups(layout, datetime.timedelta(seconds=120), seed=1)
    path = Path(folder)
    return {"router": router_by_hand(), "padding": padding(path, layout), "recompute": recompute(path, layout),
            "replay": replay(path, layout), "recomputed_replay": recomputed_replay(path, layout),
            "reference": reference(path, layout), "refused": refused(path, layout),
            "files": round_trip(path.parent / "bf16", layout)}


def chunk_of(path: Path, layout: Any, **options: Any) -> Any:
    from megarl.checkpoint.hf_import import load_hf
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    hf = HFConfig.read(path)
    chunks = build_chunks(hf, models.config_for(path, **options), layout)
    load_hf(chunks, path, hf)
    return chunks[0]


def router_by_hand() -> dict[str, Any]:
    """Loss, gradient and counts of one router on given logits; the third row is padding, its squares overflow."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.config.schema import BalanceConfig
    from megarl.model import megatron_fixes
    from megarl.model.router import Router, RouterState

    megatron_fixes.apply()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=3,
                               add_bias_linear=False, moe_router_topk=2, moe_router_load_balancing_type="none",
                               moe_ffn_hidden_size=4)
    state = RouterState([0], 3, BalanceConfig(coefficient=0.5, z_loss=0.25), torch.device("cpu"))
    router = Router(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.attach(state, 0, bias=False)
    state.set_step(torch.tensor([[0.5, 0.3, 0.2]]), global_tokens=10)
    logits = torch.tensor([[[1.0, 2.0, 0.0]], [[0.5, -1.0, 0.0]], [[1e30] * 3]], requires_grad=True)
    state.counting = True
    probs, chosen = router.routing(logits, torch.tensor([[False], [False], [True]]))
    probs.sum().mul(0.0).backward()
    return {"grad": logits.grad[:, 0], "balance": float(state.balance), "z": float(state.z),
            "counts": state.counts.tolist(), "chosen": chosen[:2].tolist()}


def padding(path: Path, layout: Any) -> dict[str, float]:
    """The same sequences with other padding within and behind them, and in another order."""
    chunk = chunk_of(path, layout)
    state = chunk.routers
    outputs, counts = [], []
    for order, multiple, total in (([0, 1, 2, 3], 1, 0), ([2, 0, 3, 1], 8, 128)):
        batch = models.pack([SEQUENCES[i] for i in order], multiple=multiple, total=total, pad_id=7)
        state.reset()
        state.counting = True
        with torch.no_grad():
            hidden = chunk(batch)[:, 0]
        where = {(order[i] if i < 4 else -1, p): row for row, (i, p) in enumerate(batch.where)}
        outputs.append(hidden[[where[i, p] for i in range(4) for p in range(len(SEQUENCES[i]))]])
        counts.append(state.counts.clone())
    return {"hidden": float((outputs[0] - outputs[1]).abs().max()),
            "counts": float((counts[0] - counts[1]).abs().max()), "total": int(counts[0].sum())}


def recompute(path: Path, layout: Any) -> dict[str, Any]:
    """Counts and losses of a training pass with and without recompute."""
    seen = []
    for kind in ("none", "full"):
        chunk = chunk_of(path, layout, recompute=kind, balance=dict(coefficient=0.1, z_loss=0.1))
        state = chunk.routers
        state.counting = True
        state.set_step(torch.full(state.counts.shape, 0.125), 60)
        chunk(models.pack(SEQUENCES)).square().mean().backward()
        seen.append((state.counts.tolist(), float(state.balance), float(state.z),
                     chunk.decoder.layers[0].mlp.router.weight.grad))
    return {"counts": seen[0][0] == seen[1][0], "losses": seen[0][1:3] == seen[1][1:3],
            "grads": torch.equal(seen[0][3], seen[1][3]), "total": sum(map(sum, seen[1][0]))}


def replay(path: Path, layout: Any) -> dict[str, Any]:
    """Recorded choices give the same output, others another; counts follow them, but for tokens without a choice."""
    chunk, batch = chunk_of(path, layout), models.pack(SEQUENCES)
    state = chunk.routers
    state.keep_choices = True
    with torch.no_grad():
        state.routing = "record"
        free = chunk(batch)
        recorded = dict(batch.experts)
        state.routing = "replay"
        same = chunk(batch)
        shifted = {layer: (chosen + 1) % 8 for layer, chosen in recorded.items()}
        shifted[2][[0, 7]] = 255
        batch.experts = shifted
        state.counting = True
        other = chunk(batch)
    kept = [[choice for choice in shifted[layer].tolist() if choice[0] != 255] for layer in range(4)]
    expected = torch.stack([torch.bincount(torch.tensor(rows).flatten(), minlength=8) for rows in kept])
    chosen = state.choices[2]
    with pytest.raises(RuntimeError, match="to replay, the batch has none"), torch.no_grad():
        chunk(models.pack(SEQUENCES))
    batch.experts = {layer: chosen[1:] for layer, chosen in shifted.items()}
    with pytest.raises(RuntimeError, match=r"60 tokens x 2 experts .* has \(59, 2\)"), torch.no_grad():
        chunk(batch)
    return {"same": torch.equal(free, same), "other": float((free - other).abs().max()),
            "small": {str(choices.dtype) for choices in recorded.values()}, "compared": state.compared.tolist(),
            "free": bool((chosen[[0, 7]] < 8).all()), "counts": torch.equal(state.counts, expected),
            "margin": state.margin}


def recomputed_replay(path: Path, layout: Any) -> dict[str, Any]:
    """Two micro-batches in flight whose layers are recomputed: each with its own routing, in either order."""
    batches = [models.pack(SEQUENCES[:2]), models.pack(SEQUENCES[2:])]
    for number, batch in enumerate(batches):
        random = torch.Generator().manual_seed(number)
        batch.experts = {layer: torch.rand(len(batch.tokens_t), 8, generator=random).topk(2).indices.to(torch.uint8)
                         for layer in range(4)}
    grads = {}
    for recompute in ("none", "full"):
        chunk = chunk_of(path, layout, recompute=recompute, balance=dict(form="none"))
        for order in ((0, 1), (1, 0)):
            chunk.zero_grad(set_to_none=True)
            chunk.routers.routing = "replay"
            outputs = [chunk(batch).square().mean() for batch in batches]
            chunk.routers.begin(None)
            for number in order:
                outputs[number].backward()
            grads[recompute, order] = {name: parameter.grad for name, parameter in chunk.named_parameters()
                                       if parameter.grad is not None}
    first, *others = grads.values()
    return {"router": min(float(grad.abs().max()) for name, grad in first.items() if "router" in name),
            "gap": max(float((other[name] - grad).abs().max()) for other in others for name, grad in first.items())}


def reference(path: Path, layout: Any) -> dict[str, bool]:
    """The weights at the start, swapped in after an update of the distributed optimizer, in bf16."""
    from megarl.config.schema import OptimConfig
    from megarl.model.reference import HostWeights
    from megarl.update.optimizer import Optimizer, wrap

    chunk, batch = chunk_of(path, layout, dtype="bf16", balance=dict(form="none")), models.pack(SEQUENCES)
    ddp = wrap([chunk], distributed=True)
    optimizer = Optimizer(ddp, OptimConfig(lr=1e-2), torch.bfloat16)
    kept = HostWeights(ddp)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return ddp[0](batch)

    before = run()
    optimizer.zero_grad()
    ddp[0](batch).float().square().mean().backward()
    optimizer.finish_gradients()
    optimizer.inner.step()
    weights = [p.detach().clone() for p in chunk.parameters()]
    addresses = [p.data_ptr() for p in chunk.parameters()]
    after = run()
    with kept.swapped_in():
        swapped = run()
        with pytest.raises(RuntimeError), kept.swapped_in():
            pass
    return {"moved": not torch.equal(before, after), "reference": torch.equal(before, swapped),
            "restored": torch.equal(after, run()) and all(map(torch.equal, weights, chunk.parameters())),
            "in place": addresses == [p.data_ptr() for p in chunk.parameters()]}


def round_trip(path: Path, layout: Any) -> list[bool]:
    """A bf16 checkpoint of one file through an fp32 and a bf16 model: the same tensors, to the byte, and metadata?"""
    from safetensors import safe_open

    from megarl.checkpoint.hf_export import save_hf

    def content(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return opened.metadata(), {name: (tensor.dtype, tuple(tensor.shape), bytes(
                tensor.contiguous().view(torch.uint8).numpy())) for name, tensor in tensors.items()}

    same = []
    for dtype in ("fp32", "bf16"):
        chunk, out = chunk_of(path, layout, dtype=dtype), path.parent / f"out-{dtype}"
        save_hf([chunk], chunk.hf, layout, path, out)
        same.append(content(path / "model.safetensors") == content(out / "model.safetensors"))
    return same


def refused(path: Path, layout: Any) -> list[str]:
    """Mistakes that the builder tells."""
    from megarl.config.layout import Layout
    from megarl.errors import UserMistake
    from megarl.model.build import transformer_config
    from megarl.model.hf_config import HFConfig

    hf, messages = HFConfig.read(path), []
    for options, degrees in [(dict(implementation="transformer_engine"), layout), ({}, Layout(world=4, pipeline=4)),
                             (dict(megatron={"moe_permute_fussion": True}), layout),
                             (dict(megatron={"num_layers": 3}), layout),
                             (dict(megatron={"recompute_granularity": "some"}), layout)]:
        try:
            transformer_config(hf, models.config_for(path, **options), degrees)
            messages.append("")
        except UserMistake as mistake:
            messages.append(str(mistake))
    return messages


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("model")
    models.save_hf_model("qwen3_moe", folder / "fp32")
    models.save_hf_model("qwen2", folder / "bf16", dtype=torch.bfloat16)
    return run_world(2, on_ranks, str(folder / "fp32"))


def test_router_losses_by_hand(world: list[dict[str, Any]]) -> None:
    """balance = c N sum f p / T, d/dx_j = c N p_j (f_j - sum f p) / T; z = c lse^2 / T, d/dx_j = 2 c lse p_j / T."""
    got = world[0]["router"]
    x = torch.tensor([[1.0, 2.0, 0.0], [0.5, -1.0, 0.0]], dtype=torch.float64)
    p, f, lse = x.exp() / x.exp().sum(1, keepdim=True), torch.tensor([0.5, 0.3, 0.2]).double(), x.exp().sum(1).log()
    assert got["balance"] == pytest.approx(float(0.5 * 3 * (p * f).sum() / 10), rel=1e-6)
    assert got["z"] == pytest.approx(float(0.25 * lse.square().sum() / 10), rel=1e-6)
    grad = 0.5 * 3 * p * (f - (p * f).sum(1, keepdim=True)) / 10 + 0.25 * 2 * lse[:, None] * p / 10
    torch.testing.assert_close(got["grad"][:2], grad.float(), rtol=1e-5, atol=1e-7)
    assert got["grad"][2].tolist() == [0, 0, 0]
    assert got["chosen"] == [[True, True, False], [True, False, True]]
    assert got["counts"] == [[2, 1, 1]]


def test_padding_and_order_change_nothing(world: list[dict[str, Any]]) -> None:
    got = world[0]["padding"]
    assert got["hidden"] < 1e-5
    assert got["counts"] == 0 and got["total"] == 4 * 2 * sum(map(len, SEQUENCES))


def test_recompute_counts_once(world: list[dict[str, Any]]) -> None:
    got = world[0]["recompute"]
    assert got["counts"] and got["losses"] and got["grads"]
    assert got["total"] == 4 * 2 * sum(map(len, SEQUENCES))


def test_replayed_routing(world: list[dict[str, Any]]) -> None:
    got = world[0]["replay"]
    assert got["same"] and got["counts"] and got["free"] and got["other"] > 1e-3
    assert got["compared"] == [60, 60, 58, 60] and got["small"] == {"torch.uint8"}
    assert 0 < got["margin"] < 1


def test_recomputed_layers_replay_their_own_micro_batch(world: list[dict[str, Any]]) -> None:
    got = world[0]["recomputed_replay"]
    assert got["router"] > 1e-6, "the router gets its gradient through the weights of the experts that it is given"
    assert got["gap"] < 1e-7


def test_reference_weights_change_places(world: list[dict[str, Any]]) -> None:
    for result in world:
        assert all(result["reference"].values()), result["reference"]


def test_export_keeps_the_source_dtype(world: list[dict[str, Any]]) -> None:
    """To the byte of each tensor."""
    assert world[0]["files"] == [True, True]


def test_mistakes_are_told(world: list[dict[str, Any]]) -> None:
    te, fits, near, owned, megatrons = world[0]["refused"]
    assert "model.implementation" in te and fits == ""
    assert "megatron.moe_permute_fussion" in near and "moe_permute_fusion" in near.split("remedy")[1]
    assert "megatron.num_layers" in owned
    assert "Megatron-core refuses" in megatrons or "recompute_granularity" in megatrons
