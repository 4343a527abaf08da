"""Which GPU a rank takes, with torch.cuda replaced by records of what is asked of it."""

from __future__ import annotations

import pytest
import torch

from megarl.cluster import device
from megarl.errors import UserMistake


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """`host(gpus)` -> list that gets the number of the GPU taken."""
    monkeypatch.setattr(device, "_prepared", None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    def make(gpus: int) -> list[int]:
        taken: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return taken

    return make


@pytest.mark.parametrize("gpus, local_rank, takes", [(8, 0, 0), (8, 7, 7), (1, 0, 0), (1, 3, 0)])
def test_the_gpu_of_the_local_rank_or_the_only_one(host, gpus: int, local_rank: int, takes: int):
    taken = host(gpus)
    device.prepare("auto", local_rank)
    assert taken == [takes] and device.kind() == "cuda" and device.backend() == "nccl"


def test_a_trainer_without_a_gpu_of_its_own_is_refused(host):
    taken = host(8)
    with pytest.raises(UserMistake, match="local rank 8 trains, but its host has 8 GPUs"):
        device.prepare("cuda", 8)
    assert not taken
    host(0)
    with pytest.raises(UserMistake, match="torch sees no CUDA device"):
        device.prepare("cuda")
