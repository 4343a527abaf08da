"""The decoder: prefill of prompts and one decode step over all slots, in as few torch operations as possible.

On a CPU a small model's step costs what its operations cost to launch, so q, k and v are one product, gate and up
another, and all experts of a small MoE two products together.

Bits: a row's result must not depend on the other rows or on how far the batch is padded. Rows and key lengths are
multiples of 16, sums over keys are cut at fixed places, and the engine's process asks MKL for its strict
reproducible mode; tests/unit/test_embedded_bits.py holds this against what torch does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from megarl.model.hf_config import HFConfig, Latent
from megarl.model.rope import inverse_frequencies, softmax_factor
from megarl.rollout.embedded import latent
from megarl.rollout.embedded.cache import ALIGN, Computed, SlotCache, aligned
from megarl.rollout.embedded.weights import LayerWeights, Weights

KEYS_PER_SUM = 512  # MKL adds longer sums in pieces whose size depends on the length
SMALL_PRODUCT = 400  # below so many multiplications in each product of a batch torch takes a loop of its own


@dataclass(frozen=True)
class Prompts:
    """Prompts of one padded length in a prefill: `count` of them, from row `start` of the packed tokens on.

    `past`: what was computed before of the tokens in front of them; then `count` is 1.
    """

    start: int
    count: int
    length: int
    past: Computed | None = None

    @property
    def before(self) -> int:
        """Tokens in front."""
        return 0 if self.past is None else len(self.past)


class Tables:
    """What depends on positions alone: rotary embedding and causal mask, for positions [0, `length`).

    Attributes:
        rotary_p2d: cosines and signed sines, [positions, 2, head_dim], in the engine's dtype.
            `rotate(x) = x * cos + roll(x, head_dim / 2) * sin` with the sign of the first half of `sin` flipped equals
            Hugging Face's rotate_half form. Where only a part of a head is rotated, cos is 1 and sin 0 in the rest.
        mask_pp: row `length - 1 - p` is what is added to the scores of a token at position p: 0 up to there, then
            -inf. A window that slides over one vector, so it takes no memory.
    """

    def __init__(self, hf: HFConfig, dtype: torch.dtype) -> None:
        self._inverse_d, self._dtype, self._rest = inverse_frequencies(hf), dtype, hf.head_dim - hf.rotary_dim
        self.length = 0

    def reserve(self, length: int) -> None:
        """Have the tables for positions [0, length)."""
        if length <= self.length:
            return
        self.length = length
        angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * self._inverse_d
        cos, sin = angles.cos(), angles.sin()
        rest = cos.new_zeros(length, self._rest)
        self.rotary_p2d = torch.stack([torch.cat([cos, cos, rest + 1], -1), torch.cat([-sin, sin, rest], -1)], 1).to(
            self._dtype)
        window = torch.zeros(2 * length, dtype=self._dtype)
        window[length:] = -math.inf
        self.mask_pp = window.as_strided((length, length), (1, 1))

    def rotary(self, positions_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, 1, head_dim]."""
        return self.rotary_p2d[positions_t].split(1, 1)

    def mask(self, positions_t: torch.Tensor, length: int) -> torch.Tensor:
        """[T, length]."""
        return self.mask_pp[:, :length].index_select(0, self.length - 1 - positions_t)


class Decoder:
    """Runs the model of `weights`. All methods run under torch.inference_mode.

    `routing`: record each token's experts beside its keys and values.
    """

    def __init__(self, weights: Weights, routing: bool = False) -> None:
        self.weights, self.hf, self.routing = weights, weights.hf, routing
        self._tables = Tables(self.hf, weights.dtype)
        self._eps, self._latent_eps = torch.tensor(self.hf.norm_eps), torch.tensor(Latent.NORM_EPS)
        self._scale = self.hf.head_dim ** -0.5 * softmax_factor(self.hf)
        per_key = self.hf.heads // self.hf.kv_heads * self.hf.head_dim
        self._fewest_keys = aligned(-(-SMALL_PRODUCT // per_key))  # so every piece of a sum takes the same kernel

    def new_cache(self, slots: int) -> SlotCache:
        """An empty cache for `slots` sequences (rounded up to whole rows)."""
        hf = self.hf
        return SlotCache(hf.layers, aligned(slots), hf.kv_heads, hf.head_dim, self.weights.dtype,
                         hf.top_k if self.routing else 0)

    @torch.inference_mode()
    def prefill(self, tokens_t: torch.Tensor, parts: list[Prompts]) -> Computed:
        """Keys and values of prompts, and where they are routed.

        Args:
            tokens_t: int64 [T], prompts one after the other, each padded at its end to its part's length.
            parts: cover the T tokens.
        Returns:
            What was computed of the T tokens. No logits: the last token of a prompt is left to the decode step.
        """
        hf, heads = self.hf, self.hf.heads
        positions_t = torch.cat([part.before + torch.arange(part.length).repeat(part.count) for part in parts])
        self._tables.reserve(max(part.before + part.length for part in parts))
        cos, sin = self._tables.rotary(positions_t)
        kv = torch.empty(hf.layers, 2, hf.kv_heads, len(tokens_t), hf.head_dim, dtype=self.weights.dtype)
        routed_tlk = self._no_routing(len(tokens_t))
        hidden_th = self.weights.embedding_vh[tokens_t]
        for number, layer in enumerate(self.weights.layers):
            qkv_tnd = self._qkv(layer, hidden_th, cos, sin)
            torch.stack(qkv_tnd[:, heads:].transpose(0, 1).split(hf.kv_heads), out=kv[number])
            last = number + 1 == hf.layers
            if last and routed_tlk is None:
                break  # nobody reads the last hidden states
            mixed = torch.cat([self._attend_prompts(qkv_tnd, part, number) for part in parts])
            hidden_th = self._project(layer, hidden_th, mixed)
            chosen = None if routed_tlk is None else routed_tlk[:, number]
            if last and layer.router_eh is not None:
                chosen.copy_(self._route(layer, self._norm(hidden_th, layer.norm2_h))[1])
            else:
                hidden_th = self._mlp(layer, hidden_th, not hf.experts, chosen)  # a prefill has many rows
        return Computed(kv, routed_tlk)

    def _no_routing(self, tokens: int) -> torch.Tensor | None:
        """Room for the experts of so many tokens, int16 [tokens, layers, k]; None if they are not recorded."""
        return torch.zeros(tokens, self.hf.layers, self.hf.top_k, dtype=torch.int16) if self.routing else None

    def _attend_prompts(self, qkv_tnd: torch.Tensor, part: Prompts, layer: int) -> torch.Tensor:
        """Causal attention inside each prompt of a part, and to what stands in front; [rows, heads * head_dim]."""
        hf = self.hf
        rows = part.count * part.length
        whole = qkv_tnd[part.start:part.start + rows].unflatten(0, (part.count, part.length)).transpose(1, 2)
        q, k, v = whole.split((hf.heads, hf.kv_heads, hf.kv_heads), 1)
        if part.past is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        else:
            past_k, past_v = part.past.kv_l2ktd[layer].unsqueeze(1)
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
            seen = torch.ones(part.length, part.before + part.length, dtype=torch.bool).tril(part.before)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self._scale,
                                                            enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, -1)

    @torch.inference_mode()
    def decode(self, tokens_r: torch.Tensor, positions_r: torch.Tensor, cache: SlotCache, length: int) -> torch.Tensor:
        """One step of slots [0, R).

        Args:
            tokens_r: int64 [R], each slot's newest token; R is a multiple of ALIGN.
            positions_r: int64 [R], its position, where its keys and values go.
            cache: of all slots.
            length: keys that are read at least, a multiple of ALIGN above the largest position.
        Returns:
            float32 logits [R, vocab].
        """
        hf, rows = self.hf, len(tokens_r)
        length += max(0, self._fewest_keys - (length % KEYS_PER_SUM or KEYS_PER_SUM))
        cache.reserve(length)
        self._tables.reserve(cache.length)
        cos, sin = self._tables.rotary(positions_r)
        bias = self._tables.mask(positions_r.unsqueeze(1).expand(-1, hf.kv_heads).flatten(), length).unsqueeze(1)
        place_rn = cache.lanes_rn[:rows] + positions_r.unsqueeze(1)
        # one view of all layers each, taken apart once: views cost as much as a small product
        lanes = rows * hf.kv_heads
        whole = cache.all.view(hf.layers, -1, hf.head_dim)
        keys, values = cache.all.flatten(2, 3)[:, :, :lanes, :length].unbind(1)
        routed_rlk = self._no_routing(rows)
        routed = [None] * hf.layers if routed_rlk is None else routed_rlk.unbind(1)
        hidden_rh = self.weights.embedding_vh[tokens_r]
        for layer, cached, keys_kdt, values_ktd, chosen in zip(self.weights.layers, whole.unbind(), keys.mT.unbind(),
                                                               values.unbind(), routed, strict=True):
            qkv_rnd = self._qkv(layer, hidden_rh, cos, sin)
            cached.index_put_((place_rn,), qkv_rnd[:, hf.heads:])
            q_kgd = qkv_rnd[:, :hf.heads].reshape(lanes, hf.heads // hf.kv_heads, hf.head_dim)
            mixed_rq = self._attend_slots(q_kgd, keys_kdt, values_ktd, bias).view(rows, -1)
            hidden_rh = self._mlp(layer, self._project(layer, hidden_rh, mixed_rq), self.weights.fused_experts,
                                  chosen)
        if routed_rlk is not None:
            cache.routed[torch.arange(rows), positions_r] = routed_rlk
        return functional.linear(self._norm(hidden_rh, self.weights.norm_h), self.weights.head_vh).float()

    def _attend_slots(self, q_kgd: torch.Tensor, keys_kdt: torch.Tensor, values_ktd: torch.Tensor,
                      bias: torch.Tensor) -> torch.Tensor:
        """One token per slot over its cached keys; k: slots x kv heads, g: query heads of one kv head. As `q_kgd`."""
        scores = torch.baddbmm(bias, q_kgd, keys_kdt, alpha=self._scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(q_kgd.dtype)
        mixed = torch.bmm(weights[..., :KEYS_PER_SUM], values_ktd[:, :KEYS_PER_SUM])
        for start in range(KEYS_PER_SUM, values_ktd.shape[1], KEYS_PER_SUM):
            end = start + KEYS_PER_SUM
            mixed = torch.baddbmm(mixed, weights[..., start:end], values_ktd[:, start:end])
        return mixed

    def _qkv(self, layer: LayerWeights, hidden_th: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """q, k and v heads [T, heads + 2 * kv_heads, head_dim], q and k normalised and rotated."""
        hf = self.hf
        normed = self._norm(hidden_th, layer.norm1_h)
        if layer.latent is not None:
            return latent.qkv(layer.latent, hf, normed, cos, sin, self._latent_norm)
        qkv_tnd = functional.linear(normed, layer.qkv_oh, layer.qkv_o).view(len(hidden_th), -1, hf.head_dim)
        qk = qkv_tnd[:, :hf.heads + hf.kv_heads]
        rotated = self._norm(qk, layer.qk_norm_nd) if hf.qk_norm else qk
        torch.addcmul(rotated * cos, self._rolled(rotated), sin, out=qk)
        return qkv_tnd

    def _project(self, layer: LayerWeights, hidden_th: torch.Tensor, mixed_tq: torch.Tensor) -> torch.Tensor:
        """hidden + the output projection of mixed values, [T, heads * head_dim]."""
        if layer.latent is not None:
            mixed_tq = latent.values_alone(mixed_tq, self.hf)
        return torch.addmm(hidden_th, mixed_tq, layer.o_oh)

    def _rolled(self, heads: torch.Tensor) -> torch.Tensor:
        """The two halves of what is rotated of each head, swapped."""
        size = self.hf.rotary_dim
        if size == heads.shape[-1]:
            return heads.roll(size // 2, -1)
        return torch.cat([heads[..., :size].roll(size // 2, -1), heads[..., size:]], -1)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor | None = None) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32, rounded before the weight is applied as Hugging Face does."""
        exact = hidden.float()
        size = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps if eps is None else eps, size, size, value=1.0 / hidden.shape[-1]).rsqrt_()
        return (exact * scale).to(hidden.dtype) * weight

    def _latent_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, weight, self._latent_eps)

    def _mlp(self, layer: LayerWeights, hidden_th: torch.Tensor, fused: bool,
             routed_tk: torch.Tensor | None = None) -> torch.Tensor:
        """hidden + MLP(norm(hidden)). `fused` must not depend on the number of rows; experts go to `routed_tk`."""
        normed = self._norm(hidden_th, layer.norm2_h)
        if layer.router_eh is None:
            return self._fused(layer, hidden_th, normed, None)
        if layer.shared_gate_up_oh is not None:
            gate, up = functional.linear(normed, layer.shared_gate_up_oh).chunk(2, -1)
            hidden_th = torch.addmm(hidden_th, functional.silu(gate) * up, layer.shared_down_fh)
        share_tk, chosen_tk = self._route(layer, normed)
        if routed_tk is not None:
            routed_tk.copy_(chosen_tk)
        if not fused:
            return self._sorted(layer, hidden_th, normed, share_tk.to(hidden_th.dtype), chosen_tk)
        share_te = share_tk.new_zeros(len(share_tk), self.hf.experts).scatter_(1, chosen_tk, share_tk)
        return self._fused(layer, hidden_th, normed, share_te.to(hidden_th.dtype))

    def _route(self, layer: LayerWeights, normed_th: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's weights (float32) and experts, [T, k]."""
        if layer.bias_e is not None:  # this family's models route in float32, whatever their dtype
            scores_te = functional.linear(normed_th.float(), layer.router_eh.float()).sigmoid()
            chosen_tk = self._in_best_groups(scores_te + layer.bias_e).topk(self.hf.top_k, -1).indices
            share_tk = scores_te.gather(1, chosen_tk)
            return share_tk / share_tk.sum(-1, keepdim=True).add_(1e-20) * self.hf.route_scale, chosen_tk
        logits_te = functional.linear(normed_th, layer.router_eh).float()
        if self.hf.norm_topk:
            share_tk, chosen_tk = logits_te.topk(self.hf.top_k, -1)
            return share_tk.softmax(-1), chosen_tk  # equals the whole softmax, its top k divided by their sum
        return logits_te.softmax(-1).topk(self.hf.top_k, -1)

    def _in_best_groups(self, scores_te: torch.Tensor) -> torch.Tensor:
        """Without the experts of groups that are not among the best, by the sum of their two best scores."""
        if self.hf.router_groups == 1:
            return scores_te
        scores_tge = scores_te.unflatten(-1, (self.hf.router_groups, -1))
        best = scores_tge.topk(2, -1).values.sum(-1).topk(self.hf.groups_taken, -1).indices.unsqueeze(-1)
        return torch.full_like(scores_tge, -math.inf).scatter(
            1, best.expand(-1, -1, scores_tge.shape[-1]), scores_tge.gather(1, best.expand(
                -1, -1, scores_tge.shape[-1]))).flatten(1)

    def _fused(self, layer: LayerWeights, hidden_th: torch.Tensor, normed_th: torch.Tensor,
               share_te: torch.Tensor | None) -> torch.Tensor:
        """All experts (or the dense MLP, one expert) on all tokens: two products.

        An expert that was not chosen has share 0 and adds exact zeros.
        """
        gate, up = functional.linear(normed_th, layer.fused_gate_up_oh).chunk(2, -1)
        inner = functional.silu(gate) * up
        if share_te is not None:
            inner.view(*share_te.shape, -1).mul_(share_te.unsqueeze(-1))
        return torch.addmm(hidden_th, inner, layer.fused_down_fh)

    def _sorted(self, layer: LayerWeights, hidden_th: torch.Tensor, normed_th: torch.Tensor, share_tk: torch.Tensor,
                chosen_tk: torch.Tensor) -> torch.Tensor:
        """Each expert on its own tokens, its rows padded so that their bits do not depend on how many there are."""
        experts_p, order_p = chosen_tk.flatten().sort(stable=True)  # p: pairs of a token and one of its experts
        counts_e = torch.bincount(experts_p, minlength=self.hf.experts)
        rooms_e = (counts_e + ALIGN - 1) // ALIGN * ALIGN
        shift_e = (rooms_e.cumsum(0) - rooms_e) - (counts_e.cumsum(0) - counts_e)
        rows_p = torch.arange(len(experts_p)) + shift_e[experts_p]
        rooms = rooms_e.tolist()
        inputs = normed_th.new_zeros(sum(rooms), normed_th.shape[1])
        inputs[rows_p] = normed_th[order_p // self.hf.top_k]
        outputs = torch.empty_like(inputs)
        gates, ups = layer.gate_up_2efh
        for expert, (mine, result) in enumerate(zip(inputs.split(rooms), outputs.split(rooms), strict=True)):
            if len(mine):
                inner = functional.silu(functional.linear(mine, gates[expert])) * functional.linear(mine, ups[expert])
                torch.mm(inner, layer.down_efh[expert], out=result)
        row_of_p = torch.empty_like(rows_p)
        row_of_p[order_p] = rows_p
        return hidden_th + (outputs[row_of_p].view(*share_tk.shape, -1) * share_tk.unsqueeze(-1)).sum(1)
