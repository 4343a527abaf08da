"""The checksum that trainer and engine compare: a formula computed in plain integers, and what it must notice."""

import pytest
import torch

from megarl.sync.checksum import tensor_checksum

MASK = (1 << 64) - 1


def _signed(value):
    return value - (1 << 64) if value >> 63 else value


def _by_hand(words):
    """The docstring's sums over 32-bit words (signed), in Python's integers with 64-bit wrap-around."""
    halves = []
    for key in (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51):
        total = 0
        for place, word in enumerate(words):
            mixed = _signed((place + 1) * key & MASK)
            mixed = _signed((mixed ^ (mixed >> 32)) * key & MASK)
            total += ((mixed ^ (mixed >> 29)) | 1) * word
        halves.append(f"{total & MASK:016x}")
    return "".join(halves)


def test_formula():
    words = [0, 1, -1, 2**31 - 1, -(2**31), 12345]
    assert tensor_checksum(torch.tensor(words, dtype=torch.int32)) == "int32[6]:" + _by_hand(words)
    assert tensor_checksum(torch.tensor([[1.0, -2.0]])) == "float32[1,2]:" + _by_hand([0x3F800000, 0xC0000000 - 2**32])
    # three bfloat16 are six bytes: one word and a half, filled up with zeros
    assert tensor_checksum(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)) == (
        "bfloat16[3]:" + _by_hand([0x40003F80, 0x4040]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_notices_any_bit_place_shape_and_dtype(dtype):
    tensor = torch.arange(64).to(dtype).reshape(8, 8)
    seen = {tensor_checksum(tensor), tensor_checksum(tensor.reshape(4, 16)), tensor_checksum(tensor.float().double())}
    assert len(seen) == 3 and tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    raw = tensor.clone().view(torch.uint8).reshape(-1)
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            seen.add(tensor_checksum(raw.view(dtype).reshape(8, 8)))
            raw[at] ^= 1 << bit
    assert len(seen) == 3 + 8 * len(raw)
    swapped = tensor.clone()
    swapped[0, 0], swapped[5, 5] = tensor[5, 5].clone(), tensor[0, 0].clone()
    assert tensor_checksum(swapped) not in seen


def test_long_tensors_are_read_in_pieces(monkeypatch):
    from megarl.sync import checksum

    tensor = torch.randn(1000)
    whole = tensor_checksum(tensor)
    monkeypatch.setattr(checksum, "_CHUNK", 64)
    assert tensor_checksum(tensor) == whole
