"""Lets Megatron-core run on CPU with gloo, without touching its files or torch.cuda.

Megatron-core names CUDA in some 190 places. An import hook, for `megatron.core*` alone, rewrites each code object as it
is loaded: the literal 'cuda' becomes 'cpu', 'torch.cuda.FloatTensor' becomes 'torch.FloatTensor', and the attribute
`cuda` (torch.cuda.x, tensor.cuda()) becomes `_megarl_cpu`, a stand-in added to torch and to Tensor below. Tracebacks
therefore show source lines that say cuda where the stand-in runs.

Here is only what CPU and gloo need. Bugs of Megatron-core that bite on any device are in `model/megatron_fixes.py`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from typing import Any

import torch

_PACKAGE = "megatron.core"
_CONSTANTS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_NAMES = {"cuda": "_megarl_cpu", "is_cuda": "is_cpu"}


class _Nothing:
    """Stands in for Stream and Event: accepts everything, does nothing, equals its kind."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    __hash__ = None  # type: ignore[assignment]


def _nothing(*_: Any, **__: Any) -> None: ...


def _namespace() -> types.ModuleType:
    """The stand-in for torch.cuda."""
    module = types.ModuleType("torch._megarl_cpu", "CPU stand-in for the parts of torch.cuda that Megatron-core uses")
    stream = _Nothing()
    for name in ("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats", "init"):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    module.current_device = lambda: torch.device("cpu")
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.Stream = module.Event = _Nothing
    module.stream = lambda _: contextlib.nullcontext()
    module.current_stream = module.default_stream = lambda *_, **__: stream
    module.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing,
                                        range=lambda *_, **__: contextlib.nullcontext())
    # the CPU generator plays the device generator
    module.manual_seed = torch.default_generator.manual_seed
    module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    module.random = types.SimpleNamespace(get_rng_state=module.get_rng_state, set_rng_state=module.set_rng_state)
    module.__getattr__ = lambda name: getattr(torch.cuda, name)  # FloatTensor, amp, OutOfMemoryError ...
    return module


def _rewrite(value: Any) -> Any:
    if isinstance(value, str):
        return _CONSTANTS.get(value, value)
    if isinstance(value, tuple):
        return tuple(map(_rewrite, value))
    if isinstance(value, frozenset):
        return frozenset(map(_rewrite, value))
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_rewrite(value.co_consts),
                             co_names=tuple(_NAMES.get(name, name) for name in value.co_names))
    return value


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return _rewrite(super().get_code(fullname))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the hook and the few replacements that gloo and a missing accelerator need. Once per process.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    if hasattr(torch, "_megarl_cpu"):
        return
    if any(name == _PACKAGE or name.startswith(_PACKAGE + ".") for name in sys.modules):
        raise RuntimeError("the CPU shim must be installed before megatron.core is imported")
    torch._megarl_cpu = sys.modules["torch._megarl_cpu"] = _namespace()
    torch.Tensor._megarl_cpu = torch.nn.Module._megarl_cpu = lambda self, *_, **__: self
    sys.meta_path.insert(0, _Finder())
    # jit_fuser is torch.compile, applied while Megatron-core is imported; switching it off afterwards is too late
    compile_, torch.compile = torch.compile, lambda f=None, **_: f if f is not None else (lambda g: g)
    try:
        import megatron.core  # noqa: F401
        from megatron.core import jit
        jit.jit_fuser = lambda f: f  # for modules imported later
    finally:
        torch.compile = compile_
    _replace_rng()
    _replace_rope_slice()
    _replace_uneven_gather()


def _replace_rng() -> None:
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _replace_rope_slice() -> None:
    """rope_utils slices the rotary table through pinned memory, which needs an accelerator."""
    import megatron.core.models.common.embeddings.rope_utils  # noqa: F401

    def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        size, rank = cp_group.size(), cp_group.rank()
        chunks = pos_emb.chunk(2 * size, dim=seq_dim)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=seq_dim)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(_PACKAGE) and hasattr(module, "get_pos_emb_on_this_cp_rank"):
            module.get_pos_emb_on_this_cp_rank = get_pos_emb_on_this_cp_rank


def _replace_uneven_gather() -> None:
    """gloo has no all_gather or reduce_scatter of unequal shares (experts with tensor parallelism use them)."""
    import megatron.core.tensor_parallel.mappings as mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_first(input_: torch.Tensor, group: Any, output_split_sizes: Any = None,
                     use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        size, sizes = group.size(), [int(s) for s in output_split_sizes]
        output = input_.new_empty([sum(sizes), *input_.shape[1:]])
        torch.distributed.all_to_all_single(output, torch.cat([input_] * size), sizes, [input_.size(0)] * size,
                                            group=group)
        return output

    def scatter_first(input_: torch.Tensor, group: Any, input_split_sizes: Any = None,
                      use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(s) for s in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_first, scatter_first
