"""F&B on two GPUs: Megatron's chunk plans over Transformer Engine's layers against plain forwards and backwards."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from dist.test_split_pair import LAYOUTS, both

WIDE = dict(hidden_size=128, num_attention_heads=4, head_dim=32, moe_intermediate_size=64)


def _rank(rank: int, where: str, folder: str) -> None:
    from megarl.cluster import device

    device.prepare(where, rank)
    torch.distributed.init_process_group(
        device.backend(), store=torch.distributed.FileStore(f"{folder}/meeting", 2), rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120))
    implementation, options = ("local", {}) if where == "cpu" else ("transformer_engine", dict(dtype="bf16"))
    found = {name: both(rank, f"{folder}/model", layout, where, implementation, options)
             for name, layout in LAYOUTS.items()}
    torch.save(found, f"{folder}/found{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_pairs_equal_sequence(where: str, tmp_path: Path) -> None:
    """In bf16, whose sums over a token's experts may come in any order: within a few of its steps, 2^-8."""
    if where != "cpu":
        pytest.importorskip("transformer_engine")
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    models.save_hf_model("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16, **WIDE)
    torch.multiprocessing.spawn(_rank, (where, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found: dict[str, list[dict[str, Any]]] = torch.load(tmp_path / f"found{rank}.pt", weights_only=False)
        for name, (plain, paired) in found.items():
            assert paired["head"] == 0, name
            for one, other in zip(plain["outputs"], paired["outputs"], strict=True):
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
            for key, tensor in plain["grads"].items():
                error, size = (tensor - paired["grads"][key]).norm(), tensor.norm()
                assert error <= 3e-2 * size + 1e-6, f"{name}: {key}"
