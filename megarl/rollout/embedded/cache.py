"""What was computed of the sequences that are being decoded, one slot each: keys, values, and perhaps the routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

ALIGN = 16  # rows and key lengths are multiples of this: a smaller matrix product may round a row differently


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of ALIGN, at least ALIGN."""
    return max(ALIGN, -(-count // ALIGN) * ALIGN)


@dataclass(frozen=True)
class Computed:
    """What the model computed of T consecutive tokens of a sequence.

    Attributes:
        kv_l2ktd: keys and values, [layers, 2, kv_heads, T, head_dim].
        routed_tlk: the experts of each token, int16 [T, layers, k], 0 in layers without experts; None in an engine that
            does not record routing.
    """

    kv_l2ktd: torch.Tensor
    routed_tlk: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.kv_l2ktd.shape[3]

    def cut(self, start: int, end: int) -> Computed:
        """Views of the tokens [start, end)."""
        return Computed(self.kv_l2ktd[:, :, :, start:end],
                        None if self.routed_tlk is None else self.routed_tlk[start:end])

    def then(self, more: Computed) -> Computed:
        """These tokens and those after them."""
        return Computed(torch.cat((self.kv_l2ktd, more.kv_l2ktd), 3),
                        None if self.routed_tlk is None else torch.cat((self.routed_tlk, more.routed_tlk)))

    def clone(self) -> Computed:
        """A copy that keeps nothing else alive."""
        return Computed(self.kv_l2ktd.clone(), None if self.routed_tlk is None else self.routed_tlk.clone())


class SlotCache:
    """`all`: [layers, 2 (keys, values), slots, kv_heads, length, head_dim]; `length` grows by doubling.

    `routed`: int16 [slots, length, layers, k], the experts that made those keys and values; None where routing is not
    recorded. It stands and falls with them, as in SGLang: a prefix that is shared brings its experts along, and what is
    computed anew after a retraction has the experts of the new computation.

    `lanes_rn` [slots, 2 * kv_heads]: where the keys, then the values, of a slot's heads begin in one layer, counted in
    vectors of head_dim.

    Positions at and after a slot's own length hold leftovers; whoever reads masks them away. They are finite unless a
    sequence overflowed, hence `clear`.
    """

    # All writes are under inference_mode because the storage may have been made under it.

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
                 routed: int = 0) -> None:
        """`routed`: experts per token and layer that are recorded; 0: none."""
        self._shape, self._dtype, self._routed = (layers, 2, slots, kv_heads, 0, head_dim), dtype, routed
        self.drop()

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self.all, self.length = torch.zeros(self._shape, dtype=self._dtype), 0
        layers, _, slots, *_ = self._shape
        self.routed = torch.zeros(slots, 0, layers, self._routed, dtype=torch.int16) if self._routed else None

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
        if self.routed is not None:
            more = torch.zeros(slots, grown - self.length, layers, self._routed, dtype=torch.int16)
            self.routed = torch.cat([self.routed, more], 1)
        self.all, self.length = bigger, grown
        lanes = torch.arange(both * slots * heads) * grown
        self.lanes_rn = lanes.view(both, slots, heads).transpose(0, 1).flatten(1)

    @torch.inference_mode()
    def place(self, slots: list[int], prefix: Computed) -> None:
        """Copy what was computed of a prefix to the start of each of `slots`."""
        where = torch.tensor(slots)
        self.all[:, :, where, :, :len(prefix)] = prefix.kv_l2ktd.unsqueeze(2)
        if self.routed is not None:
            self.routed[where, :len(prefix)] = prefix.routed_tlk

    @torch.inference_mode()
    def take(self, slot: int, tokens: int) -> Computed:
        """A copy of what was computed of the first tokens of a slot."""
        return Computed(self.all[:, :, slot, :, :tokens].clone(),
                        None if self.routed is None else self.routed[slot, :tokens].clone())

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slots to other slots."""
        to, of = torch.tensor(targets), torch.tensor(sources)
        self.all[:, :, to, :, :length] = self.all[:, :, of, :, :length]
        if self.routed is not None:
            self.routed[to, :length] = self.routed[of, :length]

    def experts(self, slot: int, start: int, end: int) -> np.ndarray:
        """A copy of the experts of a slot's tokens [start, end), int16 [tokens, layers, k]."""
        return self.routed[slot, start:end].numpy().copy()

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero one slot."""
        self.all[:, :, slot].zero_()
