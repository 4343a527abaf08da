"""Every family at TP2 x PP2 x EP2 on eight ranks: begun from a converted checkpoint, its logits are transformers', and
what it saves becomes the bytes that it began from."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from worlds import run_world

from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.team import Team

SEQUENCES = [[int(t) for t in torch.randint(2, 99, (n,), generator=torch.Generator().manual_seed(n))]
             for n in (40, 1, 23, 12)]
ODD = {"qwen2": dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)}  # heads that 2 does not divide


def on_ranks(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """What this rank sees of each family."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout

    found = {}
    for name, kind in models.FAMILIES.items():
        moe = kind["model_type"] in ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
        layout = Layout(8, tensor=2, pipeline=2, sequence=True, expert=2 if moe else 1)
        groups = make_groups(layout, datetime.timedelta(seconds=120), seed=1)
        found[name] = one(Path(folder) / name, layout, groups)
        parallel_state.destroy_model_parallel()
    return found


def one(path: Path, layout: Any, groups: Any) -> dict[str, Any]:
    """A family on one rank: the error of its logits, and which weights differ from those that Megatron-core loads."""
    from megatron.core import dist_checkpointing

    from megarl.checkpoint.hf_import import load_hf
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig

    hf = HFConfig.read(path)
    chunk, = build_chunks(hf, models.config_for(path), layout)
    converted = str(path.with_name(f"{path.name}-mg"))
    load_hf([chunk], converted, hf)
    error = logits_error(chunk, path, layout, groups)
    state = {"model0": chunk.sharded_state_dict()}
    dist_checkpointing.save(state | {"identity": {"model": hf.raw}}, made(path.with_name(f"{path.name}-step")))
    pattern = {key: value for key, value in chunk.sharded_state_dict().items() if not key.endswith("_extra_state")}
    odd = hf.kv_heads % 2 > 0  # whose heads are padded here: Megatron-core knows only one size of a tensor
    loaded = {} if odd else dist_checkpointing.load({"model0": pattern}, converted)["model0"]
    weights = chunk.weights()
    return {"error": error, "differ": [key for key, tensor in loaded.items() if not torch.equal(tensor, weights[key])],
            "loaded": odd or {key for key in weights if key != "output_layer.weight"} <= loaded.keys()}


def made(path: Path) -> str:
    """A directory."""
    path.mkdir(exist_ok=True)
    torch.distributed.barrier()
    return str(path)


def logits_error(chunk: Any, path: Path, layout: Any, groups: Any) -> float:
    """Largest difference from transformers' logits on the last stage; 0 elsewhere."""
    from megatron.core import parallel_state

    from megarl.pipeline.execute import Executor

    group, errors = parallel_state.get_tensor_model_parallel_group(), [0.0]
    expected = torch.load(path / "expected.pt")
    batch = models.pack(SEQUENCES, total=80)

    def compare(hidden: torch.Tensor, chunk: Any, batch: Any) -> None:
        rows = [torch.empty_like(hidden[:, 0]) for _ in range(2)]
        torch.distributed.all_gather(rows, hidden[:, 0].contiguous(), group=group)
        mine = torch.cat(rows) @ chunk.head_weight().T
        logits = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(logits, mine, group=group)
        whole = torch.cat(logits, 1)[:len(expected), :expected.size(1)]
        errors.append(float((whole - expected).abs().max()))

    executor = Executor([chunk], layout, chunk.hf.hidden, torch.float32, groups.pipeline_ranks)
    with torch.no_grad():
        executor.forward([batch], compare)
    return max(errors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("families")
    for name in models.FAMILIES:
        models.save_hf_model(name, folder / name, **ODD.get(name, {}))
        model = models.hf_model(name, **ODD.get(name, {}))
        with torch.no_grad():
            torch.save(torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]),
                       folder / name / "expected.pt")
        to_megatron(folder / name, folder / f"{name}-mg", Team())
    return folder, run_world(8, on_ranks, str(folder))


@pytest.mark.parametrize("name", models.FAMILIES)
def test_logits_are_those_of_transformers(world: Any, name: str) -> None:
    errors = [found[name]["error"] for found in world[1]]
    assert 0 < max(errors) < 1e-5


@pytest.mark.parametrize("name", models.FAMILIES)
def test_megatron_core_loads_the_same_weights(world: Any, name: str) -> None:
    """What megarl's reader takes of a converted checkpoint is what Megatron-core's own takes, on every rank."""
    assert [found[name]["differ"] for found in world[1]] == [[]] * 8
    assert all(found[name]["loaded"] for found in world[1])


@pytest.mark.parametrize("name", models.FAMILIES)
def test_what_it_saves_is_what_it_began_from(world: Any, name: str) -> None:
    """Padded vocabulary and heads, tied embeddings, fused and stacked layouts: every byte comes back."""
    folder = world[0]
    to_hf(folder / f"{name}-step", folder / f"{name}-back", Team(), like=folder / name)
    back, wanted = (load_file(folder / place / "model.safetensors") for place in (f"{name}-back", name))
    assert back.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor), key
