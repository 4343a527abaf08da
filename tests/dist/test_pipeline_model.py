"""The executor on real GPTModel chunks under Megatron's DDP: every gradient against one process."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
from models import config_for, pack, save_hf_model
from worlds import run_world

from megarl.config.layout import Layout

LENGTHS = ([5, 9, 3], [14], [2, 2, 6, 4], [11, 7], [1, 8], [16], [3, 3], [10], [6, 1], [4], [12, 5], [7])  # per pack
TOTAL = sum(map(sum, LENGTHS))
MODELS = {"dense": ("qwen2", {"num_hidden_layers": 8}), "tied": ("qwen3", {"num_hidden_layers": 8}),
          "moe": ("qwen3_moe", {"num_hidden_layers": 8}), "tied moe": (
              "qwen3_moe", {"num_hidden_layers": 9, "tie_word_embeddings": True}),
          "latent": ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 0})}
PLACEMENTS = {"gpipe": ("looped", 1), "1f1b": ("looped", 1), "zb-h1": ("looped", 1), "interleaved": ("looped", 2),
              "zb-v": ("v", 2), "dualpipev": ("v", 2), "dualpipe": ("mirrored", 2)}


PLANNED = ", pairs by Megatron's chunk plans"


def cases() -> dict[str, tuple[Layout, str, str]]:
    """Name -> (layout, schedule, model); worlds of 4. Nine layers: stages are not equal."""
    found = {}
    for schedule, (placement, chunks) in PLACEMENTS.items():
        here = {"placement": placement, "chunks": chunks}
        model = "tied moe" if chunks == 2 else "tied"
        found[f"{schedule} PP4 {model}"] = Layout(4, pipeline=4, **here), schedule, model
        found[f"{schedule} PP2 EP2 moe"] = Layout(4, pipeline=2, expert=2, **here), schedule, "moe"
    for schedule in ("zb-h1", "zb-v", "dualpipe"):
        here = dict(zip(("placement", "chunks"), PLACEMENTS[schedule], strict=True))
        found[f"{schedule} PP2 TP2 dense"] = (Layout(4, pipeline=2, tensor=2, sequence=True, **here), schedule, "dense")
    for schedule in ("dualpipev", "dualpipe"):
        layout, _, model = found[f"{schedule} PP2 EP2 moe"]
        found[f"{schedule} PP2 EP2 moe{PLANNED}"] = layout, schedule, model
    cut = Layout(4, pipeline=2, tensor=2, sequence=True, placement="v", chunks=2)
    found["zb-v PP2 TP2 latent"] = cut, "zb-v", "latent"
    found["dualpipev PP2 DP2 tied"] = Layout(4, pipeline=2, placement="v", chunks=2), "dualpipev", "tied"
    return found


CASES = cases()


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


def gradients(layout: Layout, folder: Path, schedule: str = "1f1b", planned: bool = False) -> dict:
    """Loss by micro-batch, and each gradient whole and by HF name, on the ranks that have them."""
    from megatron.core import parallel_state as ps

    from megarl.checkpoint.hf_export import iter_hf_tensors
    from megarl.checkpoint.hf_import import load_hf
    from megarl.cluster.groups import make_groups
    from megarl.model.build import build_chunks
    from megarl.model.head import token_logprobs
    from megarl.model.hf_config import HFConfig
    from megarl.pipeline.execute import Executor
    from megarl.update.optimizer import Optimizer, wrap

    groups = make_groups(layout, datetime.timedelta(seconds=100), seed=1)
    hf = HFConfig.read(folder)
    config = config_for(folder, balance={"coefficient": 0.1, "z_loss": 0.01})
    chunks = build_chunks(hf, config, layout)
    load_hf(chunks, folder, hf)
    for chunk in chunks:
        if chunk.routers is not None:
            fractions = torch.arange(1.0, hf.layers * hf.experts + 1).view(hf.layers, -1)
            here = slice(chunk.part.first_layer, chunk.part.first_layer + len(chunk.decoder.layers))
            chunk.routers.set_step((fractions / fractions.sum(-1, keepdim=True))[here], TOTAL)
    wrapped = wrap(chunks, distributed=False)
    optimizer = Optimizer(wrapped, config.optim, torch.float32, ends_together=layout.placement != "looped")
    optimizer.zero_grad()

    def loss_fn(hidden, chunk, batch):
        logprobs_t, entropy_t = token_logprobs(
            hidden[:, 0], chunk.head_weight(), batch.labels_t, vocab_size=hf.vocab,
            tp_group=ps.get_tensor_model_parallel_group(), sequence_parallel=layout.sequence)
        loss = ((logprobs_t + 0.1 * entropy_t) * batch.weights_t).sum()
        return loss, {"loss": loss.detach()}

    executor = Executor(wrapped, layout, hf.hidden, torch.float32, groups.pipeline_ranks if layout.pipeline > 1 else (),
                        timeout_s=100.0)
    if planned:
        from megarl.pipeline.gpu_pair import ChunkPlans

        torch.Tensor.record_stream = lambda *_: None  # there are no streams here
        executor.plans = ChunkPlans(executor.chunks, executor.weight_gradients)
    mine = batches(layout, groups.dp, hf.vocab)
    stats = executor.train(mine, loss_fn, schedule)
    optimizer.finish_gradients()
    optimizer.inner.prepare_grads()  # where the norm is taken from
    norm = optimizer.inner.get_grad_norm()
    forward = executor.forward(mine, loss_fn, schedule)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    grads = {name: tensor.clone() for name, tensor in iter_hf_tensors(chunks, hf) if tensor is not None}
    losses = {n: s["loss"].item() for n, s in enumerate(stats) if s}
    again = {n: f[0].item() for n, f in enumerate(forward) if f}
    ps.destroy_model_parallel()
    return {"dp": groups.dp, "losses": losses, "forward": again, "grads": grads, "norm": float(norm)}


def reference(rank: int, folders: dict[str, Path]) -> dict[str, dict]:
    return {model: gradients(Layout(1), folder) for model, folder in folders.items()}


def pipelined(rank: int, folders: dict[str, Path]) -> dict[str, dict]:
    return {name: gradients(layout, folders[model], schedule, name.endswith(PLANNED))
            for name, (layout, schedule, model) in CASES.items()}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[dict, list[dict]]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: save_hf_model(family, root / name, **changes) for name, (family, changes) in MODELS.items()}
    return run_world(1, reference, folders)[0], run_world(4, pipelined, folders)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_one_process(worlds, case):
    layout, _, model = CASES[case]
    one, ranks = worlds[0][model], [found[case] for found in worlds[1]]
    grads = {name: grad for found in ranks for name, grad in found["grads"].items()}
    assert grads.keys() == one["grads"].keys()
    largest = max(float(grad.abs().max()) for grad in one["grads"].values())
    worst = {name: float((grad - one["grads"][name]).abs().max()) / largest for name, grad in grads.items()}
    assert max(worst.values()) < 1e-6, max(worst.items(), key=lambda item: item[1])
    assert largest > 1e-3
    seen = []
    for found in ranks:
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-6) and one["norm"] > 1e-2
        assert found["forward"] == found["losses"]
        for number, loss in found["losses"].items():
            place = found["dp"] + number * layout.data
            assert loss == pytest.approx(one["losses"][place], abs=1e-7)
            seen.append(place)
    assert sorted(set(seen)) == list(range(len(LENGTHS)))
