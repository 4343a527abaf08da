"""Packed attention against attention of each sequence alone, with and without (simulated) context parallelism."""

import math

import pytest
import torch

from megarl.model import rope
from megarl.model.hf_config import HFConfig, RopeScaling
from megarl.model.segments import by_groups, round_up, segments

HEADS, KV_HEADS, DIM = 4, 2, 8


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Written out: softmax(q k^T / sqrt(d)) v over the positions up to each query's own, sequence by sequence."""
    out = torch.empty_like(q)
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        for t in range(a, b):
            for h in range(HEADS):
                g = h // (HEADS // KV_HEADS)
                weights = (k[a: t + 1, g] @ q[t, h] / math.sqrt(DIM)).softmax(0)
                out[t, h] = weights @ v[a: t + 1, g]
    return out


def shares_of(bounds: list[int], size: int) -> list[torch.Tensor]:
    """Each context rank's tokens, zig-zag."""
    rows: list[list[int]] = [[] for _ in range(size)]
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = (b - a) // (2 * size)
        for rank in range(size):
            for c in (rank, 2 * size - 1 - rank):
                rows[rank] += range(a + c * chunk, a + (c + 1) * chunk)
    return [torch.tensor(r) for r in rows]


@pytest.mark.parametrize("lengths", [[1], [7, 1, 3], [12, 0, 40, 33, 4, 12]])
def test_packed_equals_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k, v = (torch.randn(bounds[-1], n, DIM, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS))
    pack = segments(bounds, 1, 0, torch.device("cpu"))
    torch.testing.assert_close(by_groups(q, k, v, pack, None), alone(q, k, v, bounds))
    assert pack.cu_q.tolist() == pack.cu_k.tolist() and pack.max_q == max(lengths)


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_equals_alone(size: int) -> None:
    """Forward, and the gradients summed over ranks."""
    torch.manual_seed(0)
    lengths = [2 * size, 14 * size, 0, 6 * size, 2 * size]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k, v, weight = (torch.randn(bounds[-1], n, DIM, dtype=torch.float64, requires_grad=True)
                       for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    wanted = alone(q, k, v, bounds)
    (wanted * weight.detach()).sum().backward()
    wanted_grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    shares = shares_of(bounds, size)
    gathered = torch.cat(shares)
    for rank, rows in enumerate(shares):
        pack = segments(bounds, size, rank, torch.device("cpu"))
        out = by_groups(q[rows], k[gathered], v[gathered], pack, None)
        torch.testing.assert_close(out, wanted[rows])
        (out * weight.detach()[rows]).sum().backward()
        # what a variable-length kernel gets: each segment's keys one after the other
        assert pack.keys.numel() == pack.cu_k[-1] and pack.cu_q[-1] == len(rows)
    for x, grad in zip((q, k, v), wanted_grads, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_no_mask_larger_than_chunk_by_sequence() -> None:
    pack = segments([0, 8, 72, 4168], 2, 1, torch.device("cpu"))
    for group in pack.padded.groups:
        assert group.mask is None or group.mask.shape[2:].numel() <= 1024 * 4096
    assert all(group.mask is None for group in segments([0, 9, 4000], 1, 0, torch.device("cpu")).padded.groups)
    for_kernels = segments([0, 8, 72, 4168], 2, 1, torch.device("cpu"), padded=False)
    assert for_kernels.padded is None and torch.equal(for_kernels.keys, pack.keys)


def test_padding_is_bounded() -> None:
    assert all(n <= round_up(n) <= max(1.25 * n, n + 7) for n in range(1, 5000))
    with pytest.raises(ValueError, match="multiple of 4"):
        segments([0, 6], 2, 0, torch.device("cpu"))


def test_llama3_frequencies_by_hand() -> None:
    """Head size 8, theta 100, original length 32: wavelengths 2 pi 100^(i/4) = 6.28, 19.9, 62.8, 199."""
    raw = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
           "intermediate_size": 8, "vocab_size": 8, "rope_theta": 100.0}
    plain = rope.inverse_frequencies(HFConfig.of(raw))
    torch.testing.assert_close(plain, torch.tensor([1.0, 100 ** -0.25, 0.1, 100 ** -0.75]))
    hf = HFConfig.of({**raw, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 32}})
    assert hf.rope_scaling == RopeScaling(4.0, 1.0, 4.0, 32)
    turns = 32 * 100 ** -0.25 / (2 * math.pi)  # 1.61: between 1 and 4
    kept = (turns - 1) / 3
    second = 100 ** -0.25 * (kept + (1 - kept) / 4)
    torch.testing.assert_close(rope.inverse_frequencies(hf), torch.tensor([1.0, second, 0.025, 100 ** -0.75 / 4]))
    angles = rope.angles(torch.tensor([0, 3]), plain)
    assert angles.shape == (2, 1, 1, 8)
    torch.testing.assert_close(angles[1, 0, 0], 3 * torch.cat((plain, plain)))
