"""The router of the MoE layers: Megatron's top-k routing with megarl's balancing loss, z-loss and load counts.

The losses are sums over tokens with one global divisor, so they do not depend on how an optimizer step is cut into
ranks and micro-batches (Megatron's own balancing loss does). With T real tokens in the step, k experts per token, N
experts, and per layer

    f_e = tokens of the step that went to expert e / (T k)      counted before, no gradient flows through it
    p_te = softmax(router logits of token t)_e; of a router that scores by sigmoid, its scores over their sum

    balance = coefficient * N * sum over real tokens t, experts e of f_e p_te / T        (Switch Transformer, eq. 4)
    z       = z coefficient * sum over real tokens t of logsumexp(router logits of t)^2 / T       (ST-MoE, eq. 5)

and layers are added. Each rank adds the terms of its own tokens; summing gradients over ranks, as for the main loss,
completes them. f over the whole step is the global-batch form of Qiu et al. (2025, arXiv 2501.11873).

Routing can be replayed: a micro-batch brings the experts of its tokens along (`PackedBatch.experts`), those that the
engine took when it sampled (rollout routing replay, R3: Ma et al. 2025, arXiv 2510.11370) or those that an earlier pass
over the batch recorded. The weights are still this model's own, of the experts so chosen, so the router learns. Tokens
without a choice route freely and do not count in f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.router import TopKRouter

from megarl.config.schema import BalanceConfig

Routing = Literal["free", "replay", "record"]


class RouterState:
    """What the routers of one chunk share: counts, the step's constants, logged losses, recorded or replayed routing.

    Args:
        layers: numbers of the model's layers whose routers they are, in order.
        experts, balance, device: of the model, the run, this rank.

    Attributes:
        routing: of the forwards to come. free: by the router's choice; record: the same, kept in the batch's `experts`;
            replay: as the batch's `experts` say.
        counts: int64 [layers here, experts], tokens per expert, added up in forwards while `counting`: real ones, in a
            replay only those that have a choice. Tokens of this rank: sum over tensor (under sequence parallelism),
            context and data ranks for the step's.
        counting: whether forwards count.
        compared, differing: int64 [layers here], while `counting` in a replay: tokens that have a choice, and those
            for which the router would have chosen another set of experts.
        balance, z: fp64 scalars, the losses (with their coefficients) of this rank's tokens, added up in training
            forwards; summed over the ranks of a stage and the stages they do not depend on the layout.
        choices: while `keep_choices`, the last forward's experts, int64 [tokens here, k] per router.
        margin: while `keep_choices`, the smallest distance between what the k-th and the next expert are chosen by.
    """

    def __init__(self, layers: Sequence[int], experts: int, balance: BalanceConfig, device: torch.device) -> None:
        self.layers = tuple(layers)
        self.form, self.coefficient, self.z_coefficient = balance.form, balance.coefficient, balance.z_loss
        self.routing: Routing = "free"
        self.counts = torch.zeros(len(self.layers), experts, dtype=torch.int64, device=device)
        self.compared, self.differing = torch.zeros(2, len(self.layers), dtype=torch.int64, device=device)
        self.counting = False
        self.balance = torch.zeros((), dtype=torch.float64, device=device)
        self.z = torch.zeros((), dtype=torch.float64, device=device)
        self.fractions: torch.Tensor | None = None
        self.global_tokens = 0
        self.keep_choices = False
        self.choices: dict[int, torch.Tensor] = {}
        self.margin = float("inf")
        self._batch: Any = None

    def reset(self) -> None:
        """Zero the counts and the logged losses; forget the margin."""
        for tensor in (self.counts, self.compared, self.differing, self.balance, self.z):
            tensor.zero_()
        self.margin = float("inf")

    def set_step(self, fractions: torch.Tensor | None, global_tokens: int) -> None:
        """Give the constants of an optimizer step, before its first training forward.

        Args:
            fractions: f, [layers here, experts], each row summing to 1; None for the forms that do not use it.
            global_tokens: real tokens of the step, over all ranks and micro-batches.
        """
        if global_tokens < 1:
            raise ValueError(f"{global_tokens} real tokens in a step")
        if fractions is not None:
            if fractions.shape != self.counts.shape:
                raise ValueError(f"fractions {tuple(fractions.shape)}, this chunk has {tuple(self.counts.shape)}")
            fractions = fractions.to(device=self.counts.device, dtype=torch.float32)
        self.fractions, self.global_tokens = fractions, global_tokens

    def begin(self, batch: Any) -> None:
        """The tokens that the routers see from now on are of this micro-batch, a PackedBatch."""
        self._batch = batch

    def within(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        """The output of the batch's forward, such that its backward `begin`s again, because it may recompute.

        So whatever a schedule puts between the two, each graph knows its own micro-batch.
        """
        return _BeginAgain.apply(hidden, self, batch) if hidden.requires_grad else hidden

    def given(self, router: int, scores: torch.Tensor, topk: int) -> torch.Tensor:
        """The batch's choice for a router, int64 [tokens, k]; numbers that are no expert's where a token has none.

        Raises:
            RuntimeError: the batch has no choice of the right shape.
        """
        chosen = self._batch.experts.get(self.layers[router]) if self._batch is not None else None
        if chosen is None or chosen.shape != (len(scores), topk):
            raise RuntimeError(f"layer {self.layers[router]}: {len(scores)} tokens x {topk} experts to replay, the "
                               f"batch has {'none' if chosen is None else tuple(chosen.shape)}")
        return chosen.to(scores.device, torch.int64)

    def record(self, router: int, chosen: torch.Tensor) -> None:
        """Keep the choice of a router, int64 [tokens, k], with the batch."""
        small = torch.uint8 if self.counts.size(1) < 256 else torch.int16
        self._batch.experts[self.layers[router]] = chosen.to(small)


class _BeginAgain(torch.autograd.Function):
    """Returns its first argument; its backward, the first of the batch's, says whose it is."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, state: RouterState, batch: Any) -> torch.Tensor:
        ctx.state, ctx.batch = state, batch
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.state.begin(ctx.batch)
        return grad, None, None


class _AddLoss(torch.autograd.Function):
    """Returns its first argument; in the backward pass the second, a loss, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones_like(ctx.like)


class _TopK:
    """Chooses a layer's experts: freely, or as replayed. Megatron's routing code asks `get_replay_topk` for them.

    Attributes:
        has_choice: bool [tokens] of the last replay, which tokens were not free; None if it was no replay.
        differs: bool [tokens] of the last replay, whose router would have chosen others, free tokens aside.
    """

    def __init__(self, state: RouterState, layer: int) -> None:
        self.state, self.layer = state, layer
        self.has_choice: torch.Tensor | None = None
        self.differs: torch.Tensor | None = None

    def get_replay_topk(self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any,
                        compute: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and indices [tokens, k] of `scores` [tokens, experts]."""
        values, chosen = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.has_choice = None
        if self.state.routing == "record":
            self.state.record(self.layer, chosen)
        elif self.state.routing == "replay":
            given = self.state.given(self.layer, scores, topk)
            self.has_choice = (given[:, 0] >= 0) & (given[:, 0] < scores.size(1))
            kept = torch.where(self.has_choice[:, None], given, chosen)
            taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, kept, True)
            self.differs = ~taken.gather(1, chosen).all(1)
            values, chosen = scores.gather(1, kept), kept
        if self.state.keep_choices:
            self.state.choices[self.layer] = chosen
        return values, chosen


class Router(TopKRouter):
    """Megatron's top-k router; `attach` connects it to its chunk."""

    def attach(self, state: RouterState, layer: int, bias: bool) -> None:
        """Connect to the chunk's state; `layer` is this router's number in the chunk.

        `bias`: experts are chosen with a bias. Megatron-core would move it itself, by counts that include padding.
        """
        self.state, self.layer = state, layer
        self.router_replay = _TopK(state, layer)
        if bias:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.config.num_moe_experts, dtype=torch.float32,
                                                            device=self.weight.device))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, 1, experts] of hidden states [tokens, 1, hidden].

        Of an fp32 model by a plain product: where Transformer Engine is installed, Megatron-core's own function uses
        its GEMM, which computes fp32 products in TF32 (TE 2.11, cublaslt_gemm.cu:449), 13 bits short.
        """
        if self.config.params_dtype == torch.float32 and self.config.moe_router_dtype == "fp32":
            return torch.nn.functional.linear(input, self.weight)
        return super().gating(input)

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Route the tokens, count them, and attach this rank's share of the losses.

        Args:
            logits: [tokens, 1, experts].
            padding_mask: bool [tokens, 1], True is padding.

        Returns:
            (weights [tokens, experts], zero for experts not chosen; map bool [tokens, experts]).
        """
        state, experts = self.state, self.config.num_moe_experts
        if padding_mask is None:
            padding_mask = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
        real = ~padding_mask.reshape(-1)
        self.real_tokens = real.sum()
        if self.config.moe_router_fusion and state.routing != "free":
            raise RuntimeError("moe_router_fusion chooses experts inside a kernel: routing cannot be replayed")
        probs, chosen = super().routing(logits, padding_mask)
        logits = logits.reshape(-1, experts)
        recomputing = is_checkpointing() and torch.is_grad_enabled()
        if state.counting and not recomputing:
            self._count(chosen, real)
        if state.keep_choices:
            scores = logits if self.expert_bias is None else logits.sigmoid() + self.expert_bias
            top = scores.detach()[real].topk(min(self.topk + 1, experts)).values
            if top.numel() and top.size(1) > self.topk:
                state.margin = min(state.margin, float((top[:, -2] - top[:, -1]).min()))
        if self.training and torch.is_grad_enabled():
            probs = self._attach_losses(probs, logits.float(), real)
        return probs, chosen

    def _count(self, chosen: torch.Tensor, real: torch.Tensor) -> None:
        """Add a forward's tokens to the counts. chosen bool [tokens, experts], real bool [tokens]."""
        state, topk = self.state, self.router_replay
        if topk.has_choice is not None:
            real = real & topk.has_choice
            state.compared[self.layer] += real.sum()
            state.differing[self.layer] += (real & topk.differs).sum()
        state.counts[self.layer] += (chosen & real[:, None]).sum(0)

    def _attach_losses(self, probs: torch.Tensor, logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Add the terms of this rank's real tokens. logits fp32 [tokens, experts], real bool [tokens]."""
        state = self.state
        balanced = state.form == "global" and state.coefficient > 0
        if not balanced and not state.z_coefficient:
            return probs
        if not state.global_tokens or (balanced and state.fractions is None):
            raise RuntimeError("RouterState.set_step was not called before a training forward")
        loss = zero = logits.new_zeros(())
        if balanced:
            weight = state.coefficient * logits.size(1) * state.fractions[self.layer] / state.global_tokens
            balance = torch.where(real, self._probabilities(logits) @ weight, zero).sum()
            state.balance += balance.detach()
            loss = loss + balance
        if state.z_coefficient:
            z = torch.where(real, logits.logsumexp(-1).square(), zero).sum() * (
                state.z_coefficient / state.global_tokens)
            state.z += z.detach()
            loss = loss + z
        return _AddLoss.apply(probs, loss)

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """p of the balancing loss, [tokens, experts]; of sigmoid scores as DeepSeek-V3 (eq. 19) takes it."""
        if self.config.moe_router_score_function == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def attach_and_log_load_balancing_loss(self, activation: torch.Tensor, aux_loss_coeff: float,
                                           aux_loss: torch.Tensor, aux_loss_name: str, reduce_group: Any,
                                           reduce_group_has_dp: bool = False,
                                           valid_token_count: Any = None) -> torch.Tensor:
        """Form `megatron`: scale Megatron's loss of this micro-batch, of which `aux_loss` is this rank's share.

        Its weight is the micro-batch's part of the step's real tokens, so that the step's loss is the token-weighted
        mean over micro-batches. Megatron multiplies by a token count and relies on a division later; its count
        (`valid_token_count`) is this rank's without padding and, by an in-place all-reduce, all ranks' with it.
        """
        tokens = self.real_tokens.clone()
        torch.distributed.all_reduce(tokens, group=reduce_group)
        if not self.state.global_tokens:
            raise RuntimeError("RouterState.set_step was not called before a training forward")
        loss = aux_loss * (tokens / self.state.global_tokens)
        self.state.balance += loss.detach()
        return _AddLoss.apply(activation, loss)
