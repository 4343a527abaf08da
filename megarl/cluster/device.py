"""The accelerator behind one small interface. Nothing outside `cluster/` (and the transports of `sync/`) says cuda."""

from __future__ import annotations

import os
from typing import Literal

import torch

from megarl.errors import UserMistake

_prepared: str | None = None


def prepare(kind: Literal["auto", "cpu", "cuda"] = "auto") -> None:
    """Choose the device of this process; must run before the first import of megatron.core.

    On cpu it installs the shim that lets Megatron-core run without CUDA; on cuda it binds the process to the GPU of
    LOCAL_RANK. A second call with the same result does nothing.

    Raises:
        UserMistake: cuda was asked for and is absent.
        RuntimeError: another device was prepared before.
    """
    global _prepared
    available = torch.cuda.is_available()
    chosen = ("cuda" if available else "cpu") if kind == "auto" else kind
    if _prepared is not None:
        if chosen != _prepared:
            raise RuntimeError(f"device {_prepared} was prepared before {chosen}")
        return
    if chosen == "cuda":
        if not available:
            raise UserMistake("torch sees no CUDA device", "cluster.device", "set it to auto or cpu")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
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
