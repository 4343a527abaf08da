"""Hugging Face safetensors, or a Megatron-core checkpoint, -> the chunks of any layout; each rank reads its slices."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.checkpoint import shares
from megarl.checkpoint.megatron_dir import MegatronDir, is_megatron
from megarl.checkpoint.safetensors_dir import SafetensorsDir
from megarl.model.chunk import PolicyChunk, unwrapped
from megarl.model.families import tables
from megarl.model.hf_config import HFConfig


def load_hf(chunks: list[torch.nn.Module], path: str | Path, hf: HFConfig) -> None:
    """Fill the chunks' weights from the checkpoint at `path`, converted to their dtype.

    It is one of safetensors under Hugging Face's names, or a Megatron-core checkpoint that megarl has written. No
    communication. Load before an optimizer makes its fp32 masters.

    Raises:
        UserMistake: a file or tensor is missing, damaged, of another shape, or unknown to the family; or the checkpoint
            is of another model.
    """
    load_weights(chunks, open_weights(path, hf), hf)


def open_weights(path: str | Path, hf: HFConfig) -> SafetensorsDir | MegatronDir:
    """The checkpoint at `path`, of either kind, as tensors under Hugging Face's names."""
    if is_megatron(path):
        return MegatronDir(path, hf)
    checkpoint = SafetensorsDir(path)
    checkpoint.refuse_unknown(hf)
    return checkpoint


def load_weights(chunks: list[torch.nn.Module], weights: SafetensorsDir | MegatronDir, hf: HFConfig) -> None:
    """The same of opened weights. What pads a vocabulary or attention heads is set to 0."""
    here = shares.Coordinates.here()
    for chunk in map(unwrapped, chunks):
        _load_chunk(chunk, weights, hf, here)


@torch.no_grad()
def clear(chunks: list[torch.nn.Module]) -> None:
    """Set all weights to 0, for what follows to fill them."""
    for chunk in map(unwrapped, chunks):
        for weight in chunk.weights().values():
            weight.zero_()


@torch.no_grad()
def _load_chunk(chunk: PolicyChunk, checkpoint: SafetensorsDir | MegatronDir, hf: HFConfig,
                here: shares.Coordinates) -> None:
    table = tables.table(hf, chunk.implementation)
    left = chunk.weights()
    for parameter in shares.parameters(table, hf, chunk.part, here.ep_size):
        entry, target = parameter.entry, left.pop(parameter.megatron_name)
        expert = here.ep * (hf.experts // here.ep_size) + parameter.expert
        parts = [checkpoint.read(name, entry.hf[number].shape,
                                 *shares.cut(entry, number, *here.cut(entry), chunk.vocab_size))
                 for number, name in enumerate(parameter.hf_names(expert))]
        share = shares.fuse(entry, parts, hf)
        if entry.kind == "vocab" or entry.groups:
            target.zero_()
            target = target[tuple(map(slice, share.shape))]
        if share.shape != target.shape:
            raise RuntimeError(f"{parameter.megatron_name} is {tuple(target.shape)}, not {tuple(share.shape)}")
        target.copy_(share)
    if left:
        raise RuntimeError(f"the table of {hf.family} does not name the parameters {sorted(left)}")
