"""The executor on real GPTModel chunks under Megatron's DDP: every gradient against one process."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
from models import config_for, pack, save_hf_model
from worlds import run_world

from megarl.config.layout import Layout

LENGTHS = ([5, 9, 3], [14], [2, 2, 6, 4], [11, 7], [1, 8], [16])  # of the sequences of each micro-batch
TOTAL = sum(map(sum, LENGTHS))
CASES = {
    "PP2 x DP2, dense": (Layout(4, pipeline=2), "qwen2"),
    "PP4, dense": (Layout(4, pipeline=4), "qwen2"),
    "PP2 x TP2 + SP, tied": (Layout(4, pipeline=2, tensor=2, sequence=True), "qwen3"),
    "PP2 x EP2 (DP2), MoE": (Layout(4, pipeline=2, expert=2), "qwen3_moe"),
}


def batches(layout: Layout, dp: int, vocab: int) -> list:
    """The micro-batches of one data-parallel rank, with labels and weights per token."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for lengths in LENGTHS:
        sequences = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
        batch = pack(sequences, multiple=layout.sequence_multiple,
                     total=-(-sum(lengths) // layout.pack_multiple) * layout.pack_multiple)
        batch.labels_t = torch.randint(vocab, (sum(lengths),), generator=generator)
        batch.weights_t = torch.randn(sum(lengths), generator=generator) / TOTAL
        filling = len(batch.tokens_t) - sum(lengths)
        batch.labels_t = torch.nn.functional.pad(batch.labels_t, (0, filling))
        batch.weights_t = torch.nn.functional.pad(batch.weights_t, (0, filling))
        made.append(batch)
    return made[dp::layout.data]


def gradients(layout: Layout, folder: Path, schedule: str = "1f1b") -> dict:
    """Loss by micro-batch, and each gradient whole and by HF name, on the ranks that have them."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads

    from megarl.checkpoint.hf_export import iter_hf_tensors
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.head import token_logprobs
    from megarl.model.hf_config import HFConfig
    from megarl.pipeline.execute import Executor
    from megarl.update.optimizer import wrap

    groups = make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf = HFConfig.read(folder)
    config = config_for(folder, balance={"coefficient": 0.1, "z_loss": 0.01})
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, folder, hf)
    for chunk in chunks:
        if chunk.routers is not None:
            fractions = torch.arange(1.0, hf.layers * hf.experts + 1).view(hf.layers, -1)
            here = slice(chunk.first_layer, chunk.first_layer + len(chunk.decoder.layers))
            chunk.routers.set_step((fractions / fractions.sum(-1, keepdim=True))[here], TOTAL)
    wrapped = wrap(chunks, distributed=False)

    def loss_fn(hidden, chunk, batch):
        logprobs_t, entropy_t = token_logprobs(
            hidden[:, 0], chunk.head_weight(), batch.labels_t, vocab_size=hf.vocab,
            tp_group=ps.get_tensor_model_parallel_group(), sequence_parallel=layout.sequence)
        loss = ((logprobs_t + 0.1 * entropy_t) * batch.weights_t).sum()
        return loss, {"loss": loss.detach()}

    pp_group = ps.get_pipeline_model_parallel_group() if layout.pipeline > 1 else None
    executor = Executor(wrapped, layout, hf.hidden, torch.float32, pp_group, schedule, timeout_s=100.0)
    mine = batches(layout, groups.dp, hf.vocab)
    stats = executor.train(mine, loss_fn)
    finalize_model_grads(wrapped)
    forward = executor.forward(mine, loss_fn)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    grads = {name: tensor.clone() for name, tensor in iter_hf_tensors(chunks, hf) if tensor is not None}
    losses = [s["loss"].item() for s in stats if s] if groups.is_last_stage else []
    again = [f[0].item() for f in forward if f] if groups.is_last_stage else []
    ps.destroy_model_parallel()
    return {"dp": groups.dp, "losses": losses, "forward": again, "grads": grads}


def reference(rank: int, folders: dict[str, Path]) -> dict[str, dict]:
    return {family: gradients(Layout(1), folder) for family, folder in folders.items()}


def pipelined(rank: int, folders: dict[str, Path]) -> dict[str, dict]:
    found = {name: gradients(layout, folders[family]) for name, (layout, family) in CASES.items()}
    found["gpipe"] = gradients(*CASES["PP2 x EP2 (DP2), MoE"][:1], folders["qwen3_moe"], "gpipe")
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[dict, list[dict]]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: save_hf_model(name, root / name) for name in ("qwen2", "qwen3", "qwen3_moe")}
    return run_world(1, reference, folders)[0], run_world(4, pipelined, folders)


@pytest.mark.parametrize("case", [*CASES, "gpipe"])
def test_gradients_equal_one_process(worlds, case):
    layout, family = CASES.get(case, CASES["PP2 x EP2 (DP2), MoE"])
    one, ranks = worlds[0][family], [found[case] for found in worlds[1]]
    grads = {name: grad for found in ranks for name, grad in found["grads"].items()}
    assert grads.keys() == one["grads"].keys()
    largest = max(float(grad.abs().max()) for grad in one["grads"].values())
    worst = {name: float((grad - one["grads"][name]).abs().max()) / largest for name, grad in grads.items()}
    assert max(worst.values()) < 1e-6, max(worst.items(), key=lambda item: item[1])
    assert largest > 1e-3
    for found in ranks:
        if found["losses"]:
            assert found["losses"] == pytest.approx(one["losses"][found["dp"]::layout.data], abs=1e-7)
            assert found["forward"] == found["losses"]
