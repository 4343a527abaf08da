"""The accelerator behind one small interface. Nothing outside `cluster/` (and the transports of `sync/`) says cuda."""

from __future__ import annotations

import os
from typing import Literal

import torch

from megarl.errors import UserMistake

_prepared: str | None = None


def prepare(kind: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0) -> None:
    """Choose the device of this process; must run before the first import of megatron.core.

    On cpu it installs the shim that lets Megatron-core run without CUDA; on cuda it binds the process to a GPU, which
    makes a context there: not for rollout ranks. A second call with the same result does nothing.

    Args:
        kind: auto is cuda where there is a GPU.
        local_rank: this process's number on its host, and its GPU's; a process that sees one GPU only has that one.

    Raises:
        UserMistake: cuda was asked for and is absent, or the host has no GPU of this number.
        RuntimeError: another device was prepared before.
    """
    global _prepared
    # Read by the driver once. Megatron-core overlaps tensor-parallel communication with compute by the order of
    # launches, which only a single connection keeps; without it the overlap is lost, nothing else.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    available = torch.cuda.is_available()
    chosen = ("cuda" if available else "cpu") if kind == "auto" else kind
    if _prepared is not None:
        if chosen != _prepared:
            raise RuntimeError(f"device {_prepared} was prepared before {chosen}")
        return
    if chosen == "cuda":
        if not available:
            raise UserMistake("torch sees no CUDA device", "cluster.device", "set it to auto or cpu")
        count = torch.cuda.device_count()
        if 1 < count <= local_rank:
            raise UserMistake(f"local rank {local_rank} trains, but its host has {count} GPUs", "NPROC_PER_NODE",
                              "start at most one trainer a GPU on each node")
        torch.cuda.set_device(local_rank if count > 1 else 0)
    else:
        from megarl.cluster import cpu_shim

        cpu_shim.install()
    _prepared = chosen


def kind() -> str:
    """`cpu` or `cuda`: what `prepare` chose."""
    return _prepared or ("cuda" if torch.cuda.is_available() else "cpu")


def current() -> torch.device:
    """The device of this process's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if kind() == "cuda" else torch.device("cpu")


def use(chosen: torch.device) -> None:
    """Make it this thread's device: a new thread begins with the host's first one."""
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)


def backend() -> str:
    """The torch.distributed backend for this device: nccl or gloo."""
    return "nccl" if kind() == "cuda" else "gloo"


def synchronize() -> None:
    """Wait for the device; a timer read after it has seen all work."""
    if kind() == "cuda":
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Peak bytes allocated on the device by this process since its start; on cpu the process's peak resident size."""
    if kind() == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def accelerator_versions() -> dict[str, str]:
    """Versions of the libraries under the accelerator ({} on cpu)."""
    if kind() != "cuda":
        return {}
    return {"cuda": torch.version.cuda or "none", "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def rng_state() -> torch.Tensor:
    """State of the device's random generator."""
    return torch.cuda.get_rng_state() if kind() == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restore what `rng_state` gave."""
    if kind() == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
