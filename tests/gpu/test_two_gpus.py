"""Layouts of two ranks over NCCL, one GPU each, against one rank on the CPU, in fp32. Bounds as in test_step_gpu."""

from __future__ import annotations

import datetime
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from parity.test_layouts import CASES, train, write_samples
from worlds import run_world

FAMILIES = ("qwen3", "qwen3_moe")


def _rank(rank: int, where: str, folder: str) -> None:
    from megarl.cluster import device

    device.prepare(where, rank)
    dist.init_process_group(device.backend(), store=dist.FileStore(f"{folder}/meeting", 2), rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=120))
    found = train(rank, folder, CASES[2])
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_layouts(where: str, tmp_path: Path) -> None:
    if where == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for family in FAMILIES:
        models.save_hf_model(family, tmp_path / family)
        write_samples(tmp_path / family, family)
    single, = run_world(1, train, str(tmp_path), CASES[1][:1])
    torch.multiprocessing.spawn(_rank, (where, str(tmp_path)), nprocs=2)
    for (number, family, algorithm), ours in torch.load(tmp_path / "found.pt", weights_only=False).items():
        theirs, name = single[0, family, algorithm], f"{CASES[2][number].layout.describe()} {family} {algorithm}"
        for one, other in zip(ours["stats"], theirs["stats"], strict=True):
            assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-5), name
            assert one["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-4), name
        bound = 2e-5 * max(float(tensor.abs().max()) for tensor in theirs["grads"].values())
        for key, tensor in theirs["grads"].items():
            assert (ours["grads"][key] - tensor).abs().max() <= bound, f"{name}: gradient of {key}"
            assert (ours["weights"][key] - theirs["weights"][key]).abs().max() <= 3 * bound, f"{name}: {key}"
