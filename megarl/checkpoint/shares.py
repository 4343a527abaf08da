"""Between Hugging Face tensors and this rank's Megatron parameters: walk them, cut, fuse, split.

Everything here follows from the family's name table, the layout and this rank's coordinates; nothing communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megarl.config.stages import Part
from megarl.model.families.tables import CUT_DIM, Entry, Table, padded_groups
from megarl.model.hf_config import HFConfig


@dataclass(frozen=True)
class Coordinates:
    """This rank's place in its stage: tensor parallel, expert parallel, tensor parallel of experts."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1

    @classmethod
    def here(cls) -> Coordinates:
        """From Megatron-core's parallel_state."""
        from megatron.core import parallel_state as ps

        return cls(ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size(),
                   ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size(),
                   ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size())

    def cut(self, entry: Entry) -> tuple[int, int]:
        """(rank, size) of the cut of this entry's parameter."""
        return (self.etp, self.etp_size) if entry.expert else (self.tp, self.tp_size)


@dataclass(frozen=True)
class Parameter:
    """One of a stage's parameters; `layer` and `expert` are local, `first_layer` is the stage's."""

    entry: Entry
    layer: int
    expert: int
    first_layer: int

    @property
    def megatron_name(self) -> str:
        """Its name in the chunk."""
        return self.entry.at(self.layer, self.expert)

    def hf_names(self, expert: int | None = None) -> list[str]:
        """Its Hugging Face tensors; `expert` is the expert's number in the model."""
        return [tensor.at(self.first_layer + self.layer, self.expert if expert is None else expert)
                for tensor in self.entry.hf]


def parameters(table: Table, hf: HFConfig, part: Part, ep_size: int) -> Iterator[Parameter]:
    """A stage's parameters in order; a MoE layer's experts are those of one expert-parallel rank.

    With tied embeddings the last of several stages has a copy of the embedding as its head (`is_copy`).
    """
    experts, first_layer = hf.experts // ep_size, part.first_layer
    if part.is_first:
        yield from (Parameter(entry, 0, 0, first_layer) for entry in table.embedding)
    for layer in range(part.layers):
        for entry in table.entries(first_layer + layer):
            for expert in range(experts if entry.expert else 1):
                yield Parameter(entry, layer, expert, first_layer)
    if part.is_last:
        yield from (Parameter(entry, 0, 0, first_layer) for entry in (*table.norm, *table.head))
        if hf.tied and not part.is_first:
            yield Parameter(Entry("output_layer.weight", table.embedding[0].hf, "vocab"), 0, 0, first_layer)


def is_copy(parameter: Parameter, hf: HFConfig) -> bool:
    """Whether it repeats the first stage's embedding and so is no tensor of its own in a checkpoint."""
    return hf.tied and parameter.entry.megatron == "output_layer.weight"


def cut(entry: Entry, number: int, rank: int, size: int, padded_vocab: int) -> tuple[int | None, int, int]:
    """This rank's slice of the entry's Hugging Face tensor `number`: (dimension or None for whole, start, stop).

    Stop never passes the tensor's end; a slice of a padded vocabulary or of padded heads may so be shorter than the
    parameter (or empty).
    """
    dim = CUT_DIM[entry.kind]
    if dim is None:
        return None, 0, 0
    length = entry.hf[number].shape[dim]
    whole = padded_vocab if entry.kind == "vocab" else length
    if entry.groups:
        whole = length // entry.groups * padded_groups(entry.groups, size)
    share = whole // size
    return dim, min(rank * share, length), min((rank + 1) * share, length)


def fuse(entry: Entry, parts: list[torch.Tensor], hf: HFConfig) -> torch.Tensor:
    """One rank's slices of the Hugging Face tensors -> its Megatron parameter, without padding."""
    if entry.kind == "qkv":
        d, groups = hf.head_dim, parts[1].size(0) // hf.head_dim
        rows = (hf.heads // hf.kv_heads * d, d, d)
        return torch.cat([part.unflatten(0, (groups, n)) for part, n in zip(parts, rows, strict=True)], 1).flatten(0, 1)
    return torch.cat(parts) if entry.kind == "gate_up" else parts[0]


def split(entry: Entry, share: torch.Tensor, hf: HFConfig) -> list[torch.Tensor]:
    """The inverse of `fuse`; views where possible."""
    if entry.kind == "qkv":
        d, per_group = hf.head_dim, hf.heads // hf.kv_heads
        grouped = share.unflatten(0, (-1, (per_group + 2) * d))
        return [part.flatten(0, 1) for part in grouped.split([per_group * d, d, d], dim=1)]
    return list(share.chunk(2)) if entry.kind == "gate_up" else [share]


def join(entry: Entry, shares: list[torch.Tensor], hf: HFConfig) -> list[torch.Tensor]:
    """All ranks' parameters, in the order of their ranks -> the whole Hugging Face tensors, padding cut off."""
    dim = CUT_DIM[entry.kind]
    if dim is None:
        return [shares[0]]
    whole = (torch.cat(parts, dim) for parts in zip(*(split(entry, share, hf) for share in shares), strict=True))
    return [padded.narrow(dim, 0, tensor.shape[dim]) for padded, tensor in zip(whole, entry.hf, strict=True)]
