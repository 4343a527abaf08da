"""The head: hidden states to log-probabilities and entropies, without ever making the logits of more than one chunk.

The vocabulary projection, the temperature, the log-softmax, the gather of the label and the entropy are one autograd
function. It walks over chunks of tokens, keeps two numbers per token for the backward pass and recomputes each chunk's
logits there, so that memory grows with `chunk_tokens x vocabulary`, not with `tokens x vocabulary`. With tensor
parallelism each rank holds a block of rows of the weight and the softmax is merged over the ranks (two all-reduces of
a few numbers per token in the forward pass, whatever the number of chunks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_BLOCK_TOKENS = 128  # tokens whose softmax is taken at a time: the second copy of a chunk's logits is only this tall


def token_logprobs(hidden_th: torch.Tensor, weight_vh: torch.Tensor, labels_t: torch.Tensor, *, vocab_size: int,
                   temperature: float = 1.0, tp_group: dist.ProcessGroup | None = None,
                   sequence_parallel: bool = False, chunk_tokens: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of each next-token distribution, `log_softmax(h @ W^T / temperature)`.

    The temperature divides the fp32 logits before the softmax, as SGLang does. Both results are differentiable with
    respect to `hidden_th` and `weight_vh` (once). A token whose two incoming gradients are zero takes no part in the
    backward pass, so a NaN in its hidden state stays there, and masked tokens cost nothing.

    Args:
        hidden_th: output of the final norm, [T, h]; with sequence parallelism this rank's T / tp rows of it.
        weight_vh: this rank's rows of the head, [padded vocabulary / tp, h], same dtype as the hidden states.
        labels_t: int64 [T], ids over the whole vocabulary. Where the result is not used any value will do: ids
            outside [0, vocab_size) give a finite number without meaning.
        vocab_size: rows at or beyond it (counted over all ranks) are padding and have probability 0.
        temperature: the one of sampling, above 0.
        tp_group: tensor-parallel group in which rank r holds the r-th block of rows; None for one block.
        sequence_parallel: whether `hidden_th` is cut over `tp_group`; its gradient is then cut in the same way.
        chunk_tokens: tokens whose logits exist at a time.

    Returns:
        (logprobs [T], entropy [T] in nats): fp32, or fp64 if the hidden states are fp64; equal on all ranks of
        `tp_group`. The gradients that come back for them must be equal on those ranks too.

    Raises:
        ValueError: the labels do not fit the hidden states, or temperature or chunk_tokens is not positive.
    """
    size = tp_group.size() if tp_group is not None else 1
    rank = tp_group.rank() if size > 1 else 0
    sequence_parallel = sequence_parallel and size > 1
    tokens = hidden_th.size(0) * (size if sequence_parallel else 1)
    if labels_t.shape != (tokens,):
        raise ValueError(f"labels of shape {tuple(labels_t.shape)} for {tokens} tokens")
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature {temperature} and chunk_tokens {chunk_tokens} must be positive")
    start = rank * weight_vh.size(0)
    rows = min(max(vocab_size - start, 0), weight_vh.size(0))
    plan = _Plan(start, rows, float(temperature), tp_group if size > 1 else None, sequence_parallel, chunk_tokens)
    return _TokenLogprobs.apply(hidden_th, weight_vh, labels_t, plan)


@dataclass(frozen=True)
class _Plan:
    """What a call needs beside its tensors: this rank's first row, its rows that are no padding, and the rest."""

    start: int
    rows: int
    temperature: float
    group: Any
    sequence_parallel: bool
    chunk_tokens: int

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices over the tokens; none where this rank holds padding only."""
        for first in range(0, tokens if self.rows else 0, self.chunk_tokens):
            yield slice(first, min(first + self.chunk_tokens, tokens))

    def owned(self, labels_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(which labels are rows of this rank, their local row; 0 for the others)."""
        local_c = labels_c - self.start
        mine_c = (local_c >= 0) & (local_c < self.rows)
        return mine_c, torch.where(mine_c, local_c, 0)


class _TokenLogprobs(torch.autograd.Function):
    """Autograd of `token_logprobs`. Saves its inputs, the log of the partition sum and the mean logit of each token."""

    @staticmethod
    def forward(ctx: Any, hidden_th: torch.Tensor, weight_vh: torch.Tensor, labels_t: torch.Tensor,
                plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
        whole_th = _gather(hidden_th, plan)
        max_t, sums_3t = _local_softmax(whole_th, weight_vh[:plan.rows], labels_t, plan)
        max_t, (sum_t, weighted_t, target_t) = _merge(max_t, sums_3t, plan)
        log_sum_t, mean_t = sum_t.log(), weighted_t / sum_t  # of the logits less max_t
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_th, weight_vh, labels_t, log_sum_t + max_t, mean_t + max_t)
        return target_t - log_sum_t, log_sum_t - mean_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_t: torch.Tensor | None, grad_entropy_t: torch.Tensor | None) -> tuple:
        hidden_th, weight_vh, labels_t, log_norm_t, mean_t = ctx.saved_tensors
        if grad_logprobs_t is None and grad_entropy_t is None:
            return None, None, None, None
        plan, (need_hidden, need_weight, _, _) = ctx.plan, ctx.needs_input_grad
        scratch_br = None if grad_entropy_t is None else _scratch(log_norm_t, plan)
        zero_t = torch.zeros_like(log_norm_t)
        grads_2t = torch.stack([zero_t if g is None else g for g in (grad_logprobs_t, grad_entropy_t)])
        active_a = (grads_2t != 0).any(0).nonzero().squeeze(1)
        grads_2t /= plan.temperature
        whole_th, weight_rh = _gather(hidden_th, plan), weight_vh[:plan.rows]
        grad_hidden_th = torch.zeros_like(whole_th) if need_hidden else None
        grad_weight_vh = torch.zeros_like(weight_vh, dtype=log_norm_t.dtype) if need_weight else None
        for part in plan.chunks(len(active_a)):
            index_c = active_a[part]
            hidden_ch = whole_th[index_c]
            grad_cr = _grad_logits(_logits(hidden_ch, weight_rh, plan), labels_t[index_c], log_norm_t[index_c],
                                   mean_t[index_c], *grads_2t[:, index_c], scratch_br, plan).to(weight_vh.dtype)
            if need_hidden:
                grad_hidden_th[index_c] = _product(grad_cr, weight_rh).to(hidden_th.dtype)
            if need_weight:
                _add_product(grad_weight_vh[:plan.rows], grad_cr.T, hidden_ch)
            del grad_cr  # else it would live on beside the next chunk's
        return (_reduce(grad_hidden_th, plan) if need_hidden else None,
                grad_weight_vh.to(weight_vh.dtype) if need_weight else None, None, None)


def _local_softmax(hidden_th: torch.Tensor, weight_rh: torch.Tensor, labels_t: torch.Tensor,
                   plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Over this rank's rows: the largest logit m [T], and [3, T]: sum exp(z - m), sum exp(z - m) (z - m), z_label.

    The third is 0 where another rank owns the label. A rank of padding only answers with empty sums and a very
    negative (finite) m, which `_merge` turns into nothing.
    """
    dtype, tokens = _wide(hidden_th.dtype), hidden_th.size(0)
    max_t = hidden_th.new_full((tokens,), torch.finfo(dtype).min / 2, dtype=dtype)
    sums_3t = hidden_th.new_zeros((3, tokens), dtype=dtype)
    scratch_br = _scratch(max_t, plan)
    for part in plan.chunks(tokens):
        logits_cr = _logits(hidden_th[part], weight_rh, plan)
        mine_c, local_c = plan.owned(labels_t[part])
        sums_3t[2, part] = torch.where(mine_c, logits_cr.gather(1, local_c[:, None]).squeeze(1), 0.0)
        max_t[part] = logits_cr.amax(1)
        logits_cr.sub_(max_t[part, None])
        for block_br, sums_3b in zip(logits_cr.split(_BLOCK_TOKENS), sums_3t[:, part].split(_BLOCK_TOKENS, 1),
                                     strict=True):
            exp_br = torch.exp(block_br, out=scratch_br[:len(block_br)])
            sums_3b[0] = exp_br.sum(1)
            sums_3b[1] = block_br.mul_(exp_br).sum(1)
        del logits_cr, block_br  # as in the backward pass: one chunk at a time
    return max_t, sums_3t


def _merge(max_t: torch.Tensor, sums_3t: torch.Tensor, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the ranks' `_local_softmax` together; the third sum becomes z_label - m with the overall maximum m."""
    local_t = max_t
    if plan.group is not None:
        max_t = local_t.clone()
        dist.all_reduce(max_t, dist.ReduceOp.MAX, group=plan.group)
        shift_t = local_t - max_t
        scale_t = shift_t.exp()
        sums_3t[1] = (sums_3t[1] + sums_3t[0] * shift_t) * scale_t
        sums_3t[0] *= scale_t
        dist.all_reduce(sums_3t, group=plan.group)
    sums_3t[2] -= max_t
    return max_t, sums_3t


def _grad_logits(logits_cr: torch.Tensor, labels_c: torch.Tensor, log_norm_c: torch.Tensor, mean_c: torch.Tensor,
                 grad_logprobs_c: torch.Tensor, grad_entropy_c: torch.Tensor,
                 scratch_br: torch.Tensor | None, plan: _Plan) -> torch.Tensor:
    """Gradient [C, rows] with respect to the logits z, in their place; p is their softmax, a and b come in.

    d(a log p_label + b H) / dz = a onehot(label) - p (a + b (z - E[z])), since dH/dz = -p (log p + H).
    Without `scratch_br` b is known to be 0 and two passes over the chunk are saved.
    """
    if scratch_br is not None:
        columns = torch.stack((log_norm_c, mean_c, -grad_entropy_c, grad_logprobs_c))[:, :, None]
        for block_br, parts in zip(logits_cr.split(_BLOCK_TOKENS), columns.split(_BLOCK_TOKENS, 1), strict=True):
            log_norm_b1, mean_b1, factor_b1, grad_b1 = parts
            softmax_br = torch.sub(block_br, log_norm_b1, out=scratch_br[:len(block_br)]).exp_()
            block_br.sub_(mean_b1).mul_(factor_b1).sub_(grad_b1).mul_(softmax_br)
    else:
        logits_cr.sub_(log_norm_c[:, None]).exp_().mul_(-grad_logprobs_c[:, None])
    mine_c, local_c = plan.owned(labels_c)
    return logits_cr.scatter_add_(1, local_c[:, None], torch.where(mine_c, grad_logprobs_c, 0.0)[:, None])


def _scratch(like_t: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Room for a block's second copy. Made once: the C allocator does not give a fresh one the place of the last."""
    return like_t.new_empty((min(_BLOCK_TOKENS, plan.chunk_tokens, len(like_t)), plan.rows))


def _logits(hidden_ch: torch.Tensor, weight_rh: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """[C, rows] in at least fp32, over the temperature."""
    logits_cr = _product(hidden_ch, weight_rh.T)
    return logits_cr if plan.temperature == 1 else logits_cr.div_(plan.temperature)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: fp64 for fp64, fp32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(a_nk: torch.Tensor, b_km: torch.Tensor) -> torch.Tensor:
    """a @ b with the result in at least fp32: rounding bf16 logits to bf16 would move log-probs by about 1e-2.

    Accelerators multiply narrow operands into fp32 directly; torch's CPU kernels do not, so there they are widened.
    """
    dtype = _wide(a_nk.dtype)
    if a_nk.dtype == dtype:
        return a_nk @ b_km
    if a_nk.device.type == "cpu":
        return a_nk.to(dtype) @ b_km.to(dtype)
    return torch.mm(a_nk, b_km, out_dtype=dtype)


def _add_product(sum_nm: torch.Tensor, a_nk: torch.Tensor, b_km: torch.Tensor) -> None:
    """sum += a @ b in the type of `sum`; without a temporary where the types agree."""
    if a_nk.dtype == sum_nm.dtype:
        sum_nm.addmm_(a_nk, b_km)
    else:
        sum_nm.add_(_product(a_nk, b_km))


def _gather(hidden_th: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """All tokens' hidden states from the ranks' shares, under sequence parallelism."""
    if not plan.sequence_parallel:
        return hidden_th
    whole_th = hidden_th.new_empty((hidden_th.size(0) * plan.group.size(), hidden_th.size(1)))
    dist.all_gather_into_tensor(whole_th, hidden_th.contiguous(), group=plan.group)
    return whole_th


def _reduce(grad_th: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Sum the ranks' shares of the gradient of the hidden states; each keeps its tokens under sequence parallelism."""
    if plan.group is None:
        return grad_th
    if not plan.sequence_parallel:
        dist.all_reduce(grad_th, group=plan.group)
        return grad_th
    share_th = grad_th.new_empty((grad_th.size(0) // plan.group.size(), grad_th.size(1)))
    dist.reduce_scatter_tensor(share_th, grad_th, group=plan.group)
    return share_th
