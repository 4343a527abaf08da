"""The head on a GPU: results against plain torch in fp64, peak memory against what it should need."""

from __future__ import annotations

import pytest
import torch

VOCAB, HIDDEN, CHUNK = 32768, 256, 1024


def _inputs(tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    return (torch.randn(tokens, HIDDEN, device=device).to(dtype).requires_grad_(),
            (torch.randn(VOCAB, HIDDEN, device=device) / HIDDEN**0.5).to(dtype).requires_grad_(),
            torch.randint(VOCAB, (tokens,), device=device), *torch.randn(2, tokens, device=device))


def _step(hidden_th: torch.Tensor, weight_vh: torch.Tensor, labels_t: torch.Tensor, a_t: torch.Tensor,
          b_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from megarl.model.head import token_logprobs

    logprobs_t, entropy_t = token_logprobs(hidden_th, weight_vh, labels_t, vocab_size=VOCAB - 3, chunk_tokens=CHUNK)
    (a_t @ logprobs_t + b_t @ entropy_t).backward()
    return logprobs_t.detach(), entropy_t.detach()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 1e-4)])
def test_equals_plain_torch(where: str, dtype: torch.dtype, bound: float) -> None:
    """Logits are in fp32 whatever the inputs: sums of 256 products, then of 32768 exponentials. The gradients come back
    in the inputs' type, after a product with the logits' gradient in that type (bf16: 2^-9 an element)."""
    hidden_th, weight_vh, labels_t, a_t, b_t = _inputs(1100, where, dtype)
    logprobs_t, entropy_t = _step(hidden_th, weight_vh, labels_t, a_t, b_t)
    exact = [x.detach().double().requires_grad_() for x in (hidden_th, weight_vh)]
    logp_tv = torch.log_softmax((exact[0] @ exact[1].T)[:, :VOCAB - 3], -1)
    labels_t = labels_t.clamp(max=VOCAB - 4)
    plain_t, surprise_t = logp_tv.gather(1, labels_t[:, None])[:, 0], -(logp_tv.exp() * logp_tv).sum(-1)
    torch.testing.assert_close(logprobs_t.double(), plain_t.detach(), rtol=0, atol=bound)
    torch.testing.assert_close(entropy_t.double(), surprise_t.detach(), rtol=0, atol=bound)
    (a_t.double() @ plain_t + b_t.double() @ surprise_t).backward()
    for ours, theirs in zip((hidden_th, weight_vh), exact, strict=True):
        apart = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert apart <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_memory_does_not_grow_with_tokens_times_vocabulary(where: str) -> None:
    """A chunk's logits in fp32 and their gradient in bf16, with as much again for temporaries; the weight's gradient in
    fp32, one chunk's share of it, and in bf16; and some numbers a token. Gradients of the inputs are not counted."""
    if where == "cpu":
        pytest.skip("memory is measured on a GPU")
    _step(*_inputs(8, where, torch.bfloat16))  # loads the libraries
    for tokens in (4096, 16384):
        given = _inputs(tokens, where, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _step(*given)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - given[0].grad.nbytes
        assert extra <= 2 * CHUNK * VOCAB * 6 + VOCAB * HIDDEN * 10 + 200 * tokens, f"{tokens} tokens: {extra} bytes"
        assert extra < tokens * VOCAB * 4  # the logits alone
