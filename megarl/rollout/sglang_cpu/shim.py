"""What SGLang 0.5.23's wheel expects of a GPU machine, replaced so far that it serves on a CPU.

Its CPU kernels (`sgl-kernel`) are on no package index, and torchvision's operators are linked against CUDA; SGLang
falls back to plain torch wherever it finds a kernel missing. Everything else is SGLang's own: server, scheduler, cache,
model code, sampler, weight updates. For tests: about as fast as plain torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

import torch

_PACKAGES = ("sgl_kernel", "sgl_kernel.mamba")
_HIDDEN = ("convert_weight_packed",)  # SGLang takes it as the sign that the AMX kernels are there


def prepare() -> None:
    """Replace what is missing; before anything of SGLang is imported."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _define_torchvision()
    sys.meta_path.insert(0, _Finder())
    torch.ops.sgl_kernel = _NoOperators()


def _define_torchvision() -> None:
    """Operators that importing torchvision looks up; nothing here calls them."""
    global _operators  # a library's operators live as long as it does
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # a torchvision for CPUs has them
            pass


def _missing(name: str) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not to be had on this machine")

    return fail


class _Kernels(types.ModuleType):
    """A package `sgl_kernel` without kernels: CPU kernels can be imported by name and not called, others are absent."""

    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _HIDDEN or not name.endswith("_cpu"):
            raise AttributeError(name)
        return _missing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in _PACKAGES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _NoOperators:
    """In the place of `torch.ops.sgl_kernel`, which would find any name when asked."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def share_cores(ranks: int) -> None:
    """Give each of an engine's tensor-parallel ranks its part of this machine's cores; else SGLang wants as many NUMA
    nodes as ranks."""
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        each = max(len(cores) // ranks, 1)
        parts = [cores[rank * each % len(cores):][:each] for rank in range(ranks)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in parts))


def leave_memory_pageable(pools: types.ModuleType) -> None:
    """Have SGLang allocate its host buffers, that of routed experts for one, without pinning them for a GPU."""
    pools.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, pin_memory, allocator: allocator.allocate(
        dims, dtype=dtype, device=device)


def batch_decoding(backend: type) -> None:
    """Have SGLang's torch_native attention decode all sequences by one attention call instead of one call each.

    Twice as fast for 64 short sequences. Sliding windows and cross attention are left to SGLang.
    """
    original = backend._run_sdpa_forward_decode

    def decode(self: Any, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
               req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
               encoder_lens: Any = None, scaling: Any = None, enable_gqa: bool = False, causal: bool = False,
               is_cross_attn: bool = False, sliding_window_size: Any = None, **others: Any) -> torch.Tensor:
        """query, output [sequences, heads, head_dim]; caches [slots, kv_heads, head_dim]."""
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or is_cross_attn or windowed or others:
            return original(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                            encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
                            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size, **others)
        longest = int(seq_lens.max())
        slots = req_to_token[req_pool_indices, :longest].long()
        keys, values = (cache[slots].transpose(1, 2).to(query.dtype) for cache in (k_cache, v_cache))
        seen = (torch.arange(longest)[None] < seq_lens[:, None])[:, None, None, :]
        output.copy_(torch.nn.functional.scaled_dot_product_attention(
            query[:, :, None, :], keys, values, attn_mask=seen, scale=scaling, enable_gqa=enable_gqa)[:, :, 0, :])
        return output

    backend._run_sdpa_forward_decode = decode
