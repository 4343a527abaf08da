"""The chunks of any layout -> Hugging Face tensors, streamed whole to one rank of each stage; and to a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint import shares, streams
from megarl.checkpoint.safetensors_dir import INDEX, SafetensorsDir, carry_over
from megarl.checkpoint.streams import Slot
from megarl.config.layout import Layout
from megarl.model.chunk import PolicyChunk, unwrapped
from megarl.model.families import tables
from megarl.model.families.tables import CUT_DIM
from megarl.model.hf_config import HFConfig


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

    Collective over all trainers. Each stage's source writes its own files, tensor by tensor, so `target_dir` must be on
    a file system that all of them share. Tensors are stored in the source checkpoint's dtype; those of it that are not
    trained come along. Weights of an earlier export in `target_dir` are removed first; each file appears whole or not
    at all, the index last.
    """
    source, target = SafetensorsDir(source_dir), Path(target_dir)
    target.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        for stale in (*target.glob("*.safetensors"), *target.glob(INDEX)):
            stale.unlink()
    dist.barrier()
    *stages, beside = streams.plan_files(_slots(unwrapped(chunks[0]), hf, layout, source), shard_bytes)
    tensors = ((name, tensor) for name, tensor in iter_hf_tensors(chunks, hf) if tensor is not None)
    if is_source():
        streams.write_files(target, sum((stages[unwrapped(chunk).part.stage] for chunk in chunks), []), tensors)
    for name, _ in tensors:
        raise AssertionError(f"{name} has no file")
    if dist.get_rank() == 0:
        streams.write_files(target, beside, ((name, source.read(name, source.shape(name)))
                                             for name in source.beside(hf)))
        carry_over(Path(source_dir), target)
    dist.barrier()
    if dist.get_rank() == 0:
        streams.write_index(target, sum(stages, beside))
    dist.barrier()


def _slots(chunk: PolicyChunk, hf: HFConfig, layout: Layout, source: SafetensorsDir) -> list[list[Slot]]:
    """What is written, by stage in the order of `iter_hf_tensors`; last what is not trained."""
    whole, shapes = tables.table(hf), {tensor.name: tensor.shape for tensor in tables.hf_tensors(hf)}
    groups = [[name for parameter in shares.parameters(whole, hf, part, layout.expert)
               if not shares.is_copy(parameter, hf) for name in sum(_names(parameter, hf, layout.expert), [])]
              for part in chunk.model]
    return [[Slot(name, shapes[name] if name in shapes else source.shape(name), source.dtype(name)) for name in names]
            for names in (*groups, source.beside(hf))]
