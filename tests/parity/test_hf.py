"""The policy against transformers: logits, gradients with the MoE losses, router loads, and checkpoints to the byte.

transformers runs each sequence alone in one process; megarl runs packs with padding on four ranks, in one world.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import save_file
from worlds import run_world

TEMPERATURE, BALANCE, Z = 0.7, 0.05, 0.02
# three sequences a pack, four packs
PACKS = [[[int(t) for t in torch.randint(2, 99, (n,), generator=torch.Generator().manual_seed(100 * p + n))]
          for n in lengths] for p, lengths in enumerate([(5, 17, 30), (2, 40, 9), (24, 1, 16), (11, 12, 13)])]
TOKENS = sum(len(sequence) for pack in PACKS for sequence in pack)
MOE = dict(balance=dict(form="global", coefficient=BALANCE, z_loss=Z))
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama TP2 PP2": ("llama", dict(tensor=2, pipeline=2), {}),
    "llama tied, llama3 rope, TP2+SP PP2": ("llama_tied", dict(tensor=2, sequence=True, pipeline=2), {}),
    "qwen2 TP2+SP PP2": ("qwen2", dict(tensor=2, sequence=True, pipeline=2), {}),
    "qwen2, heads that 2 does not divide, TP2+SP PP2": (
        "qwen2_odd", dict(tensor=2, sequence=True, pipeline=2), {}),
    "qwen3 tied, heads that 2 does not divide, TP2 CP2": ("qwen3_odd", dict(tensor=2, context=2), {}),
    "qwen3 tied CP2 PP2": ("qwen3", dict(context=2, pipeline=2), dict(recompute="full")),
    "qwen3_moe TP2+SP PP2 EP2": ("qwen3_moe", dict(tensor=2, sequence=True, pipeline=2, expert=2), MOE),
    "qwen3_moe CP2 TP2+SP EP4, recompute": (
        "qwen3_moe", dict(tensor=2, sequence=True, context=2, expert=4), dict(MOE, recompute="full")),
    "qwen3_moe DP4 EP2, not normalised": ("qwen3_moe_raw", dict(expert=2), MOE),
    "qwen3_moe DP2 TP2+SP ETP2 EP2": (
        "qwen3_moe", dict(tensor=2, sequence=True, expert=2, expert_tensor=2), MOE),
    "glm4_moe TP2+SP PP2 EP2": ("glm4_moe", dict(tensor=2, sequence=True, pipeline=2, expert=2), MOE),
    "glm4_moe CP2 EP2, recompute": ("glm4_moe", dict(context=2, expert=2), dict(MOE, recompute="full")),
    "glm4_moe without q/k norms and biases, DP4": ("glm4_moe_plain", {}, MOE),
    "mixtral TP2+SP PP2 EP2": ("mixtral", dict(tensor=2, sequence=True, pipeline=2, expert=2), MOE),
    "deepseek_v3 TP2+SP PP2 EP2": ("deepseek_v3", dict(tensor=2, sequence=True, pipeline=2, expert=2), MOE),
    "deepseek_v3 CP2 TP2+SP EP2, recompute": (
        "deepseek_v3", dict(context=2, tensor=2, sequence=True, expert=2), dict(MOE, recompute="full")),
    "deepseek_v3 whole queries, no groups, no scaling, DP4": ("deepseek_v3_plain", {}, MOE),
    "qwen3_moe CP2 DP2, Megatron's balancing": (
        "qwen3_moe_megatron", dict(context=2), dict(balance=dict(form="megatron", coefficient=BALANCE, z_loss=Z))),
}
ODD = dict(num_attention_heads=6, num_key_value_heads=3)
VARIANTS = {"qwen2_odd": ("qwen2", dict(ODD, head_dim=8)), "qwen3_odd": ("qwen3", ODD),
            "glm4_moe_plain": ("glm4_moe", dict(use_qk_norm=False, attention_bias=False, first_k_dense_replace=0)),
            "deepseek_v3_plain": ("deepseek_v3", dict(
                q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=2, rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0))),
            "qwen3_moe_raw": ("qwen3_moe", dict(norm_topk_prob=False)), "qwen3_moe_megatron": ("qwen3_moe", {})}


CHOICE = {"deepseek_v3": (4, 4, 2)}  # experts of a token, groups, groups taken; else (2, 1, 1)


def token_weights() -> list[list[torch.Tensor]]:
    """A loss weight for each predicting position (the last of a sequence predicts nothing)."""
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(len(s), generator=generator) * (torch.arange(len(s)) < len(s) - 1) / TOKENS for s in pack]
            for pack in PACKS]


def reference(name: str) -> dict[str, Any]:
    """Logits, gradients, expert counts [layers, experts] and balancing and z losses by transformers, in one process."""
    family, changes = VARIANTS.get(name, (name, {}))
    model = models.hf_model(family, **changes)
    router_logits: list[list[torch.Tensor]] = []  # by pack, then layer: [tokens, experts]
    gates = [m for key, m in model.named_modules() if key.endswith("mlp.gate")]

    def keep(module: torch.nn.Module, inputs: Any, _: Any) -> None:
        rows = torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].size(-1)), module.weight)
        layer = gates.index(module)
        router_logits[-1][layer] = torch.cat((router_logits[-1][layer], rows))

    for gate in gates:
        gate.register_forward_hook(keep)
    logits, loss = [], torch.zeros(())
    for pack, weights in zip(PACKS, token_weights(), strict=True):
        router_logits.append([torch.empty(0, 8) for _ in gates])
        for sequence, weight in zip(pack, weights, strict=True):
            row = model(torch.tensor([sequence])).logits[0]
            logits.append(row.detach())
            logprobs = (row[:-1] / TEMPERATURE).log_softmax(-1)
            picked = logprobs.gather(1, torch.tensor(sequence)[1:, None])[:, 0]
            loss = loss + (picked * weight[:-1]).sum()
    biases = [getattr(gate, "e_score_correction_bias", None) for gate in gates]
    counts, balance, z = moe_losses(router_logits, name == "qwen3_moe_megatron", biases,
                                    *CHOICE.get(name, (2, 1, 1))) if gates else (None, 0.0, 0.0)
    (loss + balance + z).backward()
    grads = split_experts({key: p.grad for key, p in model.named_parameters()})
    if family == "mixtral":
        names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for old, new in names.items():
            grads = {key.replace(old, new): grad for key, grad in grads.items()}
    return {"logits": logits, "grads": grads, "counts": counts,
            "balance": float(torch.as_tensor(balance).detach()), "z": float(torch.as_tensor(z).detach())}


def moe_losses(router_logits: list[list[torch.Tensor]], per_pack: bool, biases: list[torch.Tensor | None], k: int,
               groups: int, taken: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The losses as router.py's docstring defines them, or (per pack) as the token-weighted mean of Megatron's.

    A layer with a bias scores by sigmoid and chooses by score plus bias, from the groups whose two best add up to most.
    """
    balance, z, counts = torch.zeros(()), torch.zeros(()), []
    for layer, bias in enumerate(biases):
        packs = [pack[layer] for pack in router_logits]
        whole = torch.cat(packs)
        by = whole if bias is None else whole.sigmoid() + bias
        if groups > 1:
            grouped = by.unflatten(1, (groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(taken).indices
            by = grouped.where(torch.zeros_like(grouped[..., :1]).scatter(1, best[..., None], 1.0) > 0, -9.0).flatten(1)
        chosen = torch.zeros_like(whole).scatter(1, by.topk(k).indices, 1.0)
        counts.append(chosen.sum(0).long())
        for rows, picks in zip(packs, chosen.split([len(p) for p in packs]), strict=True) if per_pack else [
                (whole, chosen)]:
            shares = rows.softmax(-1) if bias is None else torch.nn.functional.normalize(rows.sigmoid(), p=1, dim=-1)
            f, p = picks.sum(0) / (k * len(rows)), shares.sum(0) / len(rows)
            balance = balance + BALANCE * 8 * (f * p).sum() * len(rows) / TOKENS
        z = z + Z * whole.logsumexp(-1).square().sum() / TOKENS
    return torch.stack(counts), balance, z


def split_experts(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 holds a layer's experts in two parameters; name them as in a checkpoint."""
    out = {}
    for key, grad in grads.items():
        if key.endswith("experts.gate_up_proj"):
            for e, one in enumerate(grad):
                stem = key.removesuffix("gate_up_proj")
                out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = one.chunk(2)
        elif key.endswith("experts.down_proj"):
            out |= {f"{key.removesuffix('down_proj')}{e}.down_proj.weight": one for e, one in enumerate(grad)}
        else:
            out[key] = grad
    return out


def on_ranks(rank: int, folder: str) -> dict[str, dict[str, float]]:
    """All cases, on four ranks; errors by case, seen from this rank."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout

    results = {}
    for case, (name, degrees, options) in CASES.items():
        layout = Layout(world=4, **degrees)
        groups = make_groups(layout, datetime.timedelta(seconds=120), seed=1)
        results[case] = compare(Path(folder) / name, layout, groups, options)
        parallel_state.destroy_model_parallel()
    return results


def compare(path: Path, layout: Any, groups: Any, options: dict[str, Any]) -> dict[str, float]:
    """One case on one rank."""
    from megatron.core import parallel_state

    from megarl.checkpoint.hf_export import iter_hf_tensors, save_hf
    from megarl.checkpoint.hf_import import load_hf
    from megarl.model.build import build_chunks
    from megarl.model.head import token_logprobs
    from megarl.model.hf_config import HFConfig
    from megarl.pipeline.execute import Executor
    from megarl.update.optimizer import wrap

    hf, expected = HFConfig.read(path), torch.load(path / "expected.pt")
    chunks = build_chunks(hf, models.config_for(path, **options), layout)
    load_hf(chunks, path, hf)
    out_dir = path.parent / f"out-{path.name}"
    save_hf(chunks, hf, layout, path, out_dir, shard_bytes=40_000)
    chunk, state, tp_group = chunks[0], chunks[0].routers, parallel_state.get_tensor_model_parallel_group()
    ddp = wrap(chunks, distributed=False)
    executor = Executor(ddp, layout, hf.hidden, torch.float32, groups.pipeline_ranks if layout.pipeline > 1 else ())
    mine = range(groups.dp, len(PACKS), layout.data)
    batches = [packed(number, layout, groups.cp) for number in mine]
    errors = {"logits": 0.0, "grads": 0.0, "counts": 0.0, "balance": 0.0, "z": 0.0, "padding": 0.0}

    def logits_error(hidden: torch.Tensor, chunk: Any, batch: Any) -> None:
        logits = gathered(gathered(hidden[:, 0], 0, tp_group) if layout.sequence else hidden[:, 0], None, tp_group,
                          chunk.head_weight())[:, : hf.vocab]
        for row, (index, position) in zip(logits, batch.where, strict=True):
            sequences = PACKS[batch.number]
            if index < len(sequences) and position < len(sequences[index]):
                wanted = expected["logits"][3 * batch.number + index][position]
                errors["logits"] = max(errors["logits"], float((row - wanted).abs().max()))

    if state:
        state.counting = True
    executor.forward(batches, logits_error)
    if state:
        state.counting = False
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(state.counts, group=stage)
        wanted = expected["counts"][[hf.moe_layers.index(layer) for layer in state.layers]]
        errors["counts"] = float((state.counts - wanted).abs().sum())  # of no layer, in a stage without experts
        state.set_step(state.counts / state.counts.sum(1, keepdim=True), TOKENS)

    def loss(hidden: torch.Tensor, chunk: Any, batch: Any) -> tuple[torch.Tensor, dict]:
        logprobs, _ = token_logprobs(hidden[:, 0], chunk.head_weight(), batch.labels_t, vocab_size=hf.vocab,
                                     temperature=TEMPERATURE, tp_group=tp_group,
                                     sequence_parallel=layout.sequence, chunk_tokens=16)
        return (logprobs * batch.weights_t).sum(), {}

    executor.train(batches, loss)
    from megatron.core.distributed import finalize_model_grads
    finalize_model_grads(ddp)
    if state:
        for key in ("balance", "z"):
            total = getattr(state, key).clone()
            torch.distributed.all_reduce(total)
            errors[key] = abs(float(total) - expected[key]) / expected[key]
    padding = padding_of_heads(chunk, hf)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.main_grad)
    errors["padding"] = max(padding + padding_of_heads(chunk, hf))  # weights, then gradients
    largest = max(float(grad.abs().max()) for grad in expected["grads"].values())
    for key, grad in iter_hf_tensors(ddp, hf):
        if grad is not None and not key.endswith("e_score_correction_bias"):
            errors["grads"] = max(errors["grads"], float((grad - expected["grads"][key]).abs().max()) / largest)
    return errors


def padding_of_heads(chunk: Any, hf: Any) -> list[float]:
    """The largest value in the empty half of the second rank's two groups of heads, by parameter; [0] without."""
    from megatron.core import parallel_state

    if hf.kv_heads != 3 or parallel_state.get_tensor_model_parallel_rank() != 1:
        return [0.0]
    padding = []
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        padding += [w[len(w) // 2:] for w in (attention.linear_qkv.weight, attention.linear_qkv.bias) if w is not None]
        padding.append(attention.linear_proj.weight.T[attention.linear_proj.weight.size(1) // 2:])
    return [float(part.abs().max()) for part in padding]


def packed(number: int, layout: Any, cp_rank: int) -> Any:
    """A pack with labels and loss weights."""
    sequences, weights = PACKS[number], token_weights()[number]
    unit = layout.pack_multiple
    total = -(-sum(-(-len(s) // layout.sequence_multiple) * layout.sequence_multiple for s in sequences) // unit) * unit
    batch = models.pack(sequences, layout.context, cp_rank, layout.sequence_multiple, total + 2 * unit)
    labels, weight = [], []
    for index, position in batch.where:
        real = index < len(sequences) and position + 1 < len(sequences[index])
        labels.append(sequences[index][position + 1] if real else 0)
        weight.append(float(weights[index][position]) if real else 0.0)
    batch.number, batch.labels_t, batch.weights_t = number, torch.tensor(labels), torch.tensor(weight)
    return batch


def gathered(x: torch.Tensor, dim: int | None, group: Any, weight: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' rows (dim 0), or the product with all ranks' rows of `weight`."""
    if weight is not None:
        x = (x @ weight.T).T
    out = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(out, x.contiguous(), group=group)
    return torch.cat(out) if weight is None else torch.cat(out).T


def add_untrained_layer(path: Path) -> None:
    """Part of a layer for multi-token prediction, as published checkpoints have it behind the last one."""
    index = path / "model.safetensors.index.json"
    tensors = {"model.layers.4.eh_proj.weight": torch.randn(32, 64), "model.layers.4.hnorm.weight": torch.randn(32)}
    save_file(tensors, path / "model-more.safetensors")
    tree = json.loads(index.read_text())
    tree["weight_map"] |= dict.fromkeys(tensors, "model-more.safetensors")
    index.write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, float]]]]:
    """Checkpoints and expectations of all models, then all cases on four ranks."""
    folder = tmp_path_factory.mktemp("hf")
    for name in dict.fromkeys(name for name, _, _ in CASES.values()):
        family, changes = VARIANTS.get(name, (name, {}))
        models.save_hf_model(family, folder / name, max_shard_size="60KB", **changes)
        if family in ("glm4_moe", "deepseek_v3"):
            add_untrained_layer(folder / name)
        torch.save(reference(name), folder / name / "expected.pt")
        (folder / f"out-{name}").mkdir()
        (folder / f"out-{name}" / "model-00001-of-00099.safetensors").write_bytes(b"of an earlier export")
    return folder, run_world(4, on_ranks, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(world: Any, case: str) -> None:
    """Logits within 1e-5; gradients within 2e-6 of the largest (both sides round in fp32, each processor in its own
    way); expert counts equal; MoE losses to 1e-6."""
    for errors in (result[case] for result in world[1]):
        assert errors["logits"] < 1e-5, errors
        assert errors["grads"] < 2e-6, errors
        assert errors["counts"] == 0 and errors["padding"] == 0, errors
        assert errors["balance"] < 1e-6 and errors["z"] < 1e-6, errors


def test_export_gives_the_same_bytes(world: Any) -> None:
    """Every tensor of the checkpoint comes back with its dtype and bytes, and the other files too."""
    from safetensors import safe_open

    for name in dict.fromkeys(name for name, _, _ in CASES.values()):
        folders = [world[0] / name, world[0] / f"out-{name}"]
        tensors = []
        for folder in folders:
            tensors.append({})
            for file in folder.glob("*.safetensors"):
                with safe_open(file, "pt") as opened:
                    tensors[-1] |= {key: opened.get_tensor(key) for key in opened.keys()}
        assert tensors[0].keys() == tensors[1].keys()
        index = json.loads((folders[1] / "model.safetensors.index.json").read_text())
        assert {file.name for file in folders[1].glob("*.safetensors")} == set(index["weight_map"].values())
        for key, tensor in tensors[0].items():
            assert tensor.dtype == tensors[1][key].dtype and torch.equal(tensor, tensors[1][key]), key
        assert (folders[0] / "config.json").read_bytes() == (folders[1] / "config.json").read_bytes()
