"""The chunks of any layout -> Hugging Face tensors, streamed whole to one rank of each stage; and to a directory."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl.checkpoint import shares
from megarl.checkpoint.safetensors_dir import INDEX, SINGLE, SafetensorsDir
from megarl.config.layout import Layout
from megarl.config.stages import Part
from megarl.model.chunk import unwrapped
from megarl.model.families import tables
from megarl.model.families.tables import CUT_DIM
from megarl.model.hf_config import HFConfig

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def is_source() -> bool:
    """Whether this rank is its stage's source: tensor, context and data rank 0."""
    from megatron.core import parallel_state as ps

    return (ps.get_tensor_model_parallel_rank() == ps.get_context_parallel_rank() == ps.get_data_parallel_rank() == 0)


@torch.no_grad()
def iter_hf_tensors(chunks: list[torch.nn.Module], hf: HFConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every Hugging Face tensor of this rank's stages, one after the other.

    Collective: all ranks of a stage must run it to the end, and get the same names in the same order; the source has
    the whole tensor (on the device, in the parameters' dtype; may be a view: use it before the next), others None.
    Ranks whose shares the source does not need take no part in the communication.
    """
    from megatron.core import parallel_state as ps

    source = is_source()
    first = min(dist.get_process_group_ranks(ps.get_tensor_and_data_parallel_group(with_context_parallel=True)))
    dense, experts = ps.get_tensor_model_parallel_group(), ps.get_expert_tensor_and_model_parallel_group()
    here = shares.Coordinates.here()
    for chunk in map(unwrapped, chunks):
        table = tables.table(hf, chunk.implementation)
        named = chunk.weights()
        for parameter in shares.parameters(table, hf, chunk.part, here.ep_size):
            if shares.is_copy(parameter, hf):
                continue
            entry = parameter.entry
            group = experts if entry.expert else dense
            share, gathered = named[parameter.megatron_name].detach(), None
            if CUT_DIM[entry.kind] is None:
                gathered = [share]
            elif first in dist.get_process_group_ranks(group):
                gathered = _gather(share, group)
            for rank, names in enumerate(_names(parameter, hf, here.ep_size)):
                size = here.cut(entry)[1]
                whole = shares.join(entry, gathered[rank * size: (rank + 1) * size], hf) if source else (
                    [None] * len(names))
                yield from zip(names, whole, strict=True)


def _names(parameter: shares.Parameter, hf: HFConfig, ep_size: int) -> list[list[str]]:
    """The names of a parameter's tensors; for experts, of those at the same place on each expert-parallel rank."""
    if not parameter.entry.expert:
        return [parameter.hf_names()]
    return [parameter.hf_names(rank * (hf.experts // ep_size) + parameter.expert) for rank in range(ep_size)]


def _gather(share: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All ranks' shares, in the order of the group."""
    if group.size() == 1:
        return [share]
    whole = share.new_empty((group.size() * share.size(0), *share.shape[1:]))
    dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
    return list(whole.chunk(group.size()))


def save_hf(chunks: list[torch.nn.Module], hf: HFConfig, layout: Layout, source_dir: str | Path,
            target_dir: str | Path, shard_bytes: int = 5_000_000_000) -> None:
    """Write a checkpoint that transformers loads: sharded safetensors, index, and the source's other files.

    Collective over all trainers. Each stage's source writes its own shards, so `target_dir` must be on a file system
    that all of them share; at most one shard per stage is in memory. Tensors are stored in the source checkpoint's
    dtype. Weights of an earlier export in `target_dir` are removed first; each file appears whole or not at all, the
    index last.
    """
    source = SafetensorsDir(source_dir)
    dtypes = {tensor.name: source.dtype(tensor.name) for tensor in tables.hf_tensors(hf)}
    target = Path(target_dir)
    target.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        for stale in (*target.glob("*.safetensors"), *target.glob(INDEX)):
            stale.unlink()
    dist.barrier()
    files, total = plan_shards(hf, unwrapped(chunks[0]).model, layout.expert, dtypes, shard_bytes)
    left = Counter(files.values())
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in iter_hf_tensors(chunks, hf):
        if tensor is None:
            continue
        shard[name] = tensor.to(device="cpu", dtype=dtypes[name], copy=True).contiguous()
        left[files[name]] -= 1
        if not left[files[name]]:
            _write(target / files[name], shard)
            shard = {}
    dist.barrier()
    if dist.get_rank() == 0:
        carry_over(Path(source_dir), target)
        if len(left) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            (target / f".{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
            os.replace(target / f".{INDEX}", target / INDEX)
    dist.barrier()


def plan_shards(hf: HFConfig, parts: Sequence[Part], ep_size: int, dtypes: dict[str, torch.dtype],
                shard_bytes: int) -> tuple[dict[str, str], int]:
    """Which file each tensor goes to ({name: file}, in the order of `iter_hf_tensors`), and all tensors' bytes.

    A file holds tensors of one stage only, at most `shard_bytes` of them unless one tensor alone is larger.
    """
    whole = tables.table(hf)
    shapes = {tensor.name: tensor.shape for tensor in tables.hf_tensors(hf)}
    numbers: dict[str, int] = {}
    shard, filled, total = 0, 0, 0
    for part in parts:
        shard, filled = shard + 1, 0
        for parameter in shares.parameters(whole, hf, part, ep_size):
            for name in [] if shares.is_copy(parameter, hf) else sum(_names(parameter, hf, ep_size), []):
                size = torch.Size(shapes[name]).numel() * dtypes[name].itemsize
                if filled and filled + size > shard_bytes:
                    shard, filled = shard + 1, 0
                numbers[name] = shard
                filled, total = filled + size, total + size
    if shard == 1:
        return dict.fromkeys(numbers, SINGLE), total
    return {name: f"model-{number:05d}-of-{shard:05d}.safetensors" for name, number in numbers.items()}, total


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    partial = path.with_name(f".{path.name}")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def carry_over(source: Path, target: Path) -> None:
    """Copy config, tokenizer and whatever else lies beside the weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
