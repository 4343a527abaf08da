"""A checksum of a tensor's exact bytes that any device computes with integer sums. Pure: torch only.

Trainer and engine compare these after a weight update: equal strings mean equal dtype, shape and bits.
"""

from __future__ import annotations

import torch

_CHUNK = 1 << 20  # words at a time; bounds the temporaries to about 40 MB
_KEYS = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51)


def tensor_checksum(tensor: torch.Tensor) -> str:
    """`<dtype>[<shape>]:<32 hex digits>` of a tensor on any device.

    The bytes are read as little-endian 32-bit words x_i (padded with zeros), and each half of the digits is
    sum_i x_i * m_i mod 2^64 with m_i an odd mix of i and a key. Odd factors make any change of a single word change
    the sum; other changes go unseen with a chance of about 2^-64 per half. It guards against faults, not against
    someone who wants to deceive.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    words = flat.view(torch.int32)
    sums = [0, 0]
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start:start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=chunk.device)
        for half, key in enumerate(_KEYS):
            mixed = (place + 1) * key
            mixed = (mixed ^ (mixed >> 32)) * key
            sums[half] += int(((mixed ^ (mixed >> 29) | 1) * chunk).sum())
    digits = "".join(f"{value % (1 << 64):016x}" for value in sums)
    shape = ",".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]:{digits}"
