"""The fused head against plain log_softmax and autograd, alone and over tensor-parallel ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import run_world

from megarl.model.head import token_logprobs


def plain(hidden_th, weight_vh, labels_t, vocab_size, temperature):
    """The textbook computation with full logits."""
    logp_tv = torch.log_softmax(hidden_th @ weight_vh[:vocab_size].T / temperature, -1)
    return logp_tv.gather(1, labels_t[:, None]).squeeze(1), -(logp_tv.exp() * logp_tv).sum(-1)


def make(tokens, vocab, padded, hidden=5, dtype=torch.float64, seed=0):
    """(hidden states, weight with garbage in the padding rows, labels, gradients for log-probs and for entropy)."""
    g = torch.Generator().manual_seed(seed)
    weight_vh = torch.randn(padded, hidden, generator=g, dtype=torch.float64)
    weight_vh[vocab:] = 50.0
    return (torch.randn(tokens, hidden, generator=g, dtype=torch.float64).to(dtype), weight_vh.to(dtype),
            torch.randint(vocab, (tokens,), generator=g), torch.randn(tokens, generator=g, dtype=torch.float64),
            torch.randn(tokens, generator=g, dtype=torch.float64))


def run(function, hidden_th, weight_vh, labels_t, grad_lp_t, grad_h_t):
    """Values and gradients of sum(grad_lp * logprobs + grad_h * entropy), as fp64."""
    hidden_th, weight_vh = hidden_th.clone().requires_grad_(), weight_vh.clone().requires_grad_()
    logprobs_t, entropy_t = function(hidden_th, weight_vh, labels_t)
    torch.autograd.backward([logprobs_t, entropy_t], [grad_lp_t.to(logprobs_t), grad_h_t.to(entropy_t)])
    return [t.detach().double() for t in (logprobs_t, entropy_t, hidden_th.grad, weight_vh.grad)]


def test_hand_worked():
    # Logits (0, 2 ln 2) at temperature 2 are (0, ln 2): p = (1/3, 2/3).
    # log p(1) = ln 2 - ln 3; H = ln 3 - (2/3) ln 2.
    # d log p(1) / d h = ((1 - 2/3) * w1 - (1/3) * w0) / 2 = (1/3) 2 ln 2 / 2 = ln 2 / 3 (w0 = 0, w1 = 2 ln 2).
    hidden_th = torch.ones(1, 1, requires_grad=True)
    weight_vh = torch.tensor([[0.0], [2 * math.log(2)], [99.0]])  # the third row is padding
    logprobs_t, entropy_t = token_logprobs(hidden_th, weight_vh, torch.tensor([1]), vocab_size=2, temperature=2.0)
    assert logprobs_t.item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    assert entropy_t.item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2), abs=1e-6)
    logprobs_t.sum().backward()
    assert hidden_th.grad.item() == pytest.approx(math.log(2) / 3, abs=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])  # 7 tokens: T divisible and not, one chunk
def test_matches_full_logits(dtype, tolerance, chunk_tokens):
    hidden_th, weight_vh, labels_t, *grads = make(7, 11, 16)
    want = run(lambda h, w, y: plain(h, w, y, 11, 0.7), hidden_th, weight_vh, labels_t, *grads)
    got = run(lambda h, w, y: token_logprobs(h, w, y, vocab_size=11, temperature=0.7, chunk_tokens=chunk_tokens),
              hidden_th.to(dtype), weight_vh.to(dtype), labels_t, *grads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert not got[3][11:].any()  # padding rows get no gradient


def test_gradcheck():
    hidden_th, weight_vh, labels_t, *_ = make(5, 7, 8, hidden=3)
    weight_vh[7:] = 0.5
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, labels_t, vocab_size=7, temperature=1.3, chunk_tokens=2),
        (hidden_th.requires_grad_(), weight_vh.requires_grad_()))


def test_bf16_keeps_logits_wide():
    # The operands are bf16, everything after them fp32: values must be those of the rounded operands in fp64.
    hidden_th, weight_vh, labels_t, *grads = make(6, 40, 40, hidden=64, dtype=torch.bfloat16)
    got = run(lambda h, w, y: token_logprobs(h, w, y, vocab_size=40, chunk_tokens=4), hidden_th, weight_vh, labels_t,
              *grads)
    want = run(lambda h, w, y: plain(h, w, y, 40, 1.0), hidden_th.double(), weight_vh.double(), labels_t, *grads)
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(got[2:], want[2:], strict=True):  # bf16 gradients: 2^-8 of the largest
        assert (a - b).abs().max() < 2 ** -7 * b.abs().max()
    logprobs_t, entropy_t = token_logprobs(hidden_th, weight_vh, labels_t, vocab_size=40)
    assert logprobs_t.dtype == entropy_t.dtype == torch.float32


def test_large_logits_do_not_overflow():
    logprobs_t, entropy_t = token_logprobs(torch.ones(1, 1), torch.tensor([[3e4], [3e4 - 1.0]]), torch.tensor([0]),
                                           vocab_size=2)
    p = 1 / (1 + math.exp(-1))
    assert logprobs_t.item() == pytest.approx(math.log(p), abs=1e-6)
    assert entropy_t.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_nan_of_an_unused_token_stays_there():
    hidden_th, weight_vh, labels_t, grad_lp_t, grad_h_t = make(6, 9, 9)
    used_t = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    grads = [torch.where(used_t, g, 0.0) for g in (grad_lp_t, grad_h_t)]

    def fused(h, w, y):
        return token_logprobs(h, w, y, vocab_size=9, chunk_tokens=4)

    want = run(fused, hidden_th, weight_vh, labels_t, *grads)
    dirty_th, dirty_t = hidden_th.clone(), labels_t.clone()
    dirty_th[~used_t], dirty_t[~used_t] = float("nan"), -100
    got = run(fused, dirty_th, weight_vh, dirty_t, *grads)
    assert torch.equal(got[0][used_t], want[0][used_t])
    assert torch.equal(got[2], want[2]) and torch.equal(got[3], want[3])


def test_labels_outside_the_vocabulary_are_finite():
    hidden_th, weight_vh, *_ = make(3, 9, 12)
    logprobs_t, _ = token_logprobs(hidden_th, weight_vh, torch.tensor([-100, 9, 10**6]), vocab_size=9)
    assert torch.isfinite(logprobs_t).all()


def test_no_tokens_and_no_gradients():
    hidden_th, weight_vh, labels_t, *_ = make(4, 9, 9)
    empty = run(lambda h, w, y: token_logprobs(h, w, y, vocab_size=9), hidden_th[:0], weight_vh, labels_t[:0],
                torch.zeros(0), torch.zeros(0))
    assert [t.shape[0] for t in empty] == [0, 0, 0, 9] and not empty[3].any()

    frozen_th = hidden_th.clone().requires_grad_()  # a frozen head: only the hidden states get a gradient
    token_logprobs(frozen_th, weight_vh, labels_t, vocab_size=9)[0].sum().backward()
    want = run(lambda h, w, y: plain(h, w, y, 9, 1.0), hidden_th, weight_vh, labels_t, torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(frozen_th.grad, want[2])

    with torch.no_grad():
        logprobs_t, entropy_t = token_logprobs(hidden_th, weight_vh.requires_grad_(), labels_t, vocab_size=9)
    assert logprobs_t.grad_fn is None and entropy_t.grad_fn is None


def test_refuses_what_does_not_fit():
    hidden_th, weight_vh, labels_t, *_ = make(4, 9, 9)
    with pytest.raises(ValueError, match="for 4 tokens"):
        token_logprobs(hidden_th, weight_vh, labels_t[:3], vocab_size=9)
    with pytest.raises(ValueError, match="must be positive"):
        token_logprobs(hidden_th, weight_vh, labels_t, vocab_size=9, temperature=0.0)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result, in elements, of any operation."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def test_never_more_than_one_chunk_of_logits():
    tokens, vocab, chunk = 96, 50, 8
    hidden_th, weight_vh, labels_t, *grads = make(tokens, vocab, vocab, hidden=3, dtype=torch.float32)
    with LargestTensor() as seen:
        run(lambda h, w, y: token_logprobs(h, w, y, vocab_size=vocab, chunk_tokens=chunk), hidden_th, weight_vh,
            labels_t, *grads)
    # 400: one chunk's logits, larger than the inputs (hidden 288, weight 150) and far below 4800, all tokens' logits.
    assert seen.largest == chunk * vocab


# name: (tokens, vocabulary, padded rows, temperature, chunk). In "empty rank" the second rank holds padding only.
CASES = {"even": (8, 24, 24, 1.0, 3), "padded": (6, 19, 24, 0.6, 100), "empty rank": (4, 7, 16, 1.0, 2),
         "no tokens": (0, 19, 24, 1.0, 2)}


def tp_cases(rank):
    """Every case on this rank of a tensor-parallel pair, without and with sequence parallelism."""
    group, results = torch.distributed.group.WORLD, {}
    for name, (tokens, vocab, padded, temperature, chunk) in CASES.items():
        hidden_th, weight_vh, labels_t, *grads = make(tokens, vocab, padded)
        weight_vh = weight_vh.chunk(2)[rank]
        for sequence in (False, True):
            if sequence:
                hidden_th = hidden_th[rank * tokens // 2:(rank + 1) * tokens // 2]
            results[name, sequence] = run(
                lambda h, w, y, v=vocab, t=temperature, c=chunk, s=sequence: token_logprobs(
                    h, w, y, vocab_size=v, temperature=t, tp_group=group, sequence_parallel=s, chunk_tokens=c),
                hidden_th, weight_vh, labels_t, *grads)
    return results


def test_tensor_parallel_equals_one_process():
    ranks = run_world(2, tp_cases)
    for name, (tokens, vocab, padded, temperature, _) in CASES.items():
        want = run(lambda h, w, y, v=vocab, t=temperature: plain(h, w, y, v, t), *make(tokens, vocab, padded))
        for sequence in (False, True):
            (lp0, h0, gh0, gw0), (lp1, h1, gh1, gw1) = (results[name, sequence] for results in ranks)
            assert torch.equal(lp0, lp1) and torch.equal(h0, h1), name
            assert sequence or torch.equal(gh0, gh1), name
            got = lp0, h0, torch.cat((gh0, gh1)) if sequence else gh0, torch.cat((gw0, gw1))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
