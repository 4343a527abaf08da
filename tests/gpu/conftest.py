"""These tests need a GPU: `bash launch/test.sh tests/gpu`. Each world of one rank is this process itself.

MEGARL_GPU_TESTS=cpu runs on a CPU what can run there. It shows that the tests are whole and says nothing of a GPU.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

DEVICE = os.environ.get("MEGARL_GPU_TESTS", "cuda")


@pytest.fixture(scope="session")
def where() -> str:
    """cuda, or what MEGARL_GPU_TESTS says."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees none")
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def world(where: str) -> Iterator[None]:
    """A process group of this process alone."""
    from megarl.cluster import device

    device.prepare(where)
    torch.distributed.init_process_group(device.backend(), store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def groups() -> Iterator[Any]:
    """The groups of a layout of one rank."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout

    yield make_groups(Layout(1), datetime.timedelta(seconds=120), seed=1)
    parallel_state.destroy_model_parallel()
