"""Causal attention over packed sequences (thd) with grouped queries and context parallelism, for the local layers.

Never a tokens x tokens mask: on a GPU the variable-length kernel of torch or flash-attn, elsewhere torch's SDPA over
small padded batches of sequences of similar length. Under context parallelism keys and values are all-gathered (their
gradients reduce-scattered), as in Llama 3 (sec. 3.3.2): cheap for grouped queries, and exact.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from megarl.model.segments import Segments, by_groups


@dataclass
class LocalPack(PackedSeqParams):
    """What the local attention needs to know of a pack.

    Its `qkv_format` is "sbhd": Megatron's layer then keeps [tokens, 1, heads, dim] and applies the rotary angles row by
    row, so they can be each token's own; its "thd" path would guess positions from the boundaries.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None
    angles_t1d: torch.Tensor | None = None  # for latent attention


class PackedAttention(MegatronModule):
    """Core attention: no parameters. Queries [tokens, 1, heads, dim], keys and values [tokens, 1, kv heads, dim].

    Latent attention leaves out the second dimension, and its values are smaller than its keys.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any = None, attention_type: Any = None,
                 attention_dropout: Any = None, softmax_scale: float | None = None, cp_comm_type: Any = None,
                 pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
                attn_mask_type: Any = None, attention_bias: Any = None,
                packed_seq_params: LocalPack | None = None) -> torch.Tensor:
        """Returns [tokens, 1, heads * dim]. `packed_seq_params` must be a LocalPack."""
        pack = packed_seq_params.segments
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.cp_group)
                          for x in (key, value))
        query_thd, key_thd, value_thd = (x.flatten(0, -3) for x in (query, key, value))
        kernel = varlen_kernel(query.device.type, query.dtype)
        if kernel is None:
            output_thd = by_groups(query_thd, key_thd, value_thd, pack, self.scale)
        else:
            if pack.keys is not None:
                key_thd, value_thd = key_thd.index_select(0, pack.keys), value_thd.index_select(0, pack.keys)
            size = value_thd.size(-1)  # the kernels want values as large as keys
            value_thd = torch.nn.functional.pad(value_thd, (0, key_thd.size(-1) - size))
            output_thd = kernel(query_thd, key_thd, value_thd, pack, self.scale)[..., :size]
        return output_thd.reshape(output_thd.size(0), 1, -1)


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, float | None], torch.Tensor]


@cache
def varlen_kernel(device: str, dtype: torch.dtype) -> Kernel | None:
    """The variable-length kernel for this device and dtype: flash-attn's, else torch's, else None."""
    if device == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if importlib.util.find_spec("flash_attn") is not None:
        return _flash_attn
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # its first versions had neither this nor windows
            return _torch_varlen
    return None


def _flash_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Segments,
                scale: float | None) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # causal is aligned to the lower right corner (flash-attn >= 2.1)

    return flash_attn_varlen_func(query, key, value, pack.cu_q, pack.cu_k, pack.max_q, pack.max_k,
                                  softmax_scale=scale, causal=True)


def _torch_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Segments,
                  scale: float | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(query, key, value, pack.cu_q, pack.cu_k, pack.max_q, pack.max_k, scale=scale,
                       window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1))
