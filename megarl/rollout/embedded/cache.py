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

    # All writes are under inference_mode because the storage may have been made under it.

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype = (layers, 2, slots, kv_heads, 0, head_dim), dtype
        self.drop()

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self.all, self.length = torch.zeros(self._shape, dtype=self._dtype), 0

    def reserve(self, length: int) -> None:
        """Have room for `length` positions in each slot."""
        if length > self.length:
            self._grow(length)

    @torch.inference_mode()
    def _grow(self, length: int) -> None:
        grown = max(64, 1 << (length - 1).bit_length())
        layers, both, slots, heads, _, dim = self._shape
        bigger = torch.zeros(layers, both, slots, heads, grown, dim, dtype=self._dtype)
        bigger[:, :, :, :, :self.length] = self.all
        self.all, self.length = bigger, grown
        lanes = torch.arange(both * slots * heads) * grown
        self.lanes_rn = lanes.view(both, slots, heads).transpose(0, 1).flatten(1)

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
    def clear(self, slot: int) -> None:
        """Zero one slot."""
        self.all[:, :, slot].zero_()
