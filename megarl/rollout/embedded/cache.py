"""Keys and values of the sequences that are being decoded, one slot each."""

from __future__ import annotations

import torch

ALIGN = 16  # rows and key lengths are multiples of this: a smaller matrix product may round a row differently


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of ALIGN, at least ALIGN."""
    return max(ALIGN, -(-count // ALIGN) * ALIGN)


class SlotCache:
    """[layers, 2 (keys, values), slots, kv_heads, length, head_dim]; `length` grows by doubling.

    `lanes_rn` [slots, 2 * kv_heads]: where the keys, then the values, of a slot's heads begin in one layer, counted in
    vectors of head_dim.

    Positions at and after a slot's own length hold leftovers; whoever reads masks them away. They are finite unless a
    sequence overflowed, hence `clear`.
    """

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.all = torch.zeros(layers, 2, slots, kv_heads, 0, head_dim, dtype=dtype)
        self.length = 0
        self.lanes_rn = torch.zeros(slots, 2 * kv_heads, dtype=torch.int64)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Have room for `length` positions in each slot."""
        if length <= self.length:
            return
        grown = max(64, 1 << (length - 1).bit_length())
        shape = list(self.all.shape)
        shape[4] = grown
        bigger = self.all.new_zeros(shape)
        bigger[:, :, :, :, :self.length] = self.all
        self.all, self.length = bigger, grown
        _, both, slots, heads, _, _ = shape
        self.lanes_rn = (torch.arange(both * slots * heads) * grown).view(both, slots, heads).transpose(0, 1).flatten(1)

    @torch.inference_mode()
    def place(self, slots: list[int], kv_l2ktd: torch.Tensor) -> None:
        """Copy keys and values [layers, 2, kv_heads, tokens, head_dim] to the start of each of `slots`."""
        tokens = kv_l2ktd.shape[3]
        self.all[:, :, torch.tensor(slots), :, :tokens] = kv_l2ktd.unsqueeze(2)

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slots to other slots."""
        self.all[:, :, torch.tensor(targets), :, :length] = self.all[:, :, torch.tensor(sources), :, :length]

    @torch.inference_mode()
    def clear(self, slot: int | None = None) -> None:
        """Zero one slot, or all."""
        (self.all if slot is None else self.all[:, :, slot]).zero_()
