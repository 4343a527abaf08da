"""What an optimizer step does about its experts: replays their routing, counts their tokens, moves their bias.

Aux-loss-free balancing (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, sec. 2.1.2): a bias is added
to an expert's score when experts are chosen, never to its weight. After an optimizer step with c_e tokens at expert e,

    bias_e <- bias_e + rate * sign(mean of c - c_e)

c over all ranks and micro-batches of the step, real tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.config.schema import Config
from megarl.data.routing import ReplayShare, RoutingShape
from megarl.model.chunk import PolicyChunk
from megarl.model.hf_config import HFConfig
from megarl.model.router import RouterState, Routing

# of the pass that fills in old log-probs, and of training, by moe.replay
OLD_PASS: dict[str, Routing] = {"none": "free", "engine": "replay", "old": "record"}
TRAINING: dict[str, Routing] = {"none": "free", "engine": "replay", "old": "replay"}


@dataclass
class Load:
    """Where the routers of one chunk sent the tokens of a step, over all ranks.

    Attributes:
        counts: float64 [layers, experts], tokens.
        compared, differing: float64 [layers]; of a replay's tokens, those whose router would have chosen otherwise.
    """

    counts: torch.Tensor
    compared: torch.Tensor
    differing: torch.Tensor

    @property
    def fractions(self) -> torch.Tensor:
        """Each expert's share, [layers, experts]; rows sum to 1."""
        return self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1)

    @property
    def entropy(self) -> torch.Tensor:
        """Of the shares, over that of even ones: float64 [layers] in [0, 1]."""
        return torch.special.entr(self.fractions).sum(-1) / math.log(self.counts.size(-1))


def replay_share(config: Config, hf: HFConfig, chunks: Sequence[PolicyChunk], groups: Groups) -> ReplayShare | None:
    """What this rank needs of the engines' routing; None where it is not replayed."""
    if config.moe.replay != "engine":
        return None
    layers = sorted({layer for chunk in chunks for layer in chunk.routers.layers})
    split = groups.layout.tensor if groups.layout.sequence else 1
    return ReplayShare(RoutingShape.of(hf), tuple(layers), groups.tp if split > 1 else 0, split)


def _states(chunks: Sequence[PolicyChunk]) -> list[RouterState]:
    return [chunk.routers for chunk in chunks if chunk.routers is not None]


@contextmanager
def counting(chunks: Sequence[PolicyChunk], routing: Routing) -> Iterator[None]:
    """Forwards within route so, and count their tokens from zero; afterwards routing is free again."""
    for state in _states(chunks):
        state.reset()
        state.routing, state.counting = routing, True
    try:
        yield
    finally:
        for state in _states(chunks):
            state.routing, state.counting = "free", False


def loads(chunks: Sequence[PolicyChunk], stage_peers: dist.ProcessGroup) -> list[Load]:
    """What was counted, by chunk of this rank. Collective over `stage_peers`, all ranks that hold the same layers."""
    found = []
    for state in _states(chunks):
        whole = torch.cat((state.counts, state.compared[:, None], state.differing[:, None]), 1).double()
        dist.all_reduce(whole, group=stage_peers)
        found.append(Load(whole[:, :-2], whole[:, -2], whole[:, -1]))
    return found


@torch.no_grad()
def move_bias(chunks: Sequence[PolicyChunk], counted: Sequence[Load], rate: float) -> None:
    """The bias of aux-loss-free balancing after an optimizer step; nothing for a router without one."""
    for chunk, load in zip(chunks, counted, strict=True):
        for number, router in enumerate(chunk.router_modules()):
            if router.expert_bias is not None:
                counts = load.counts[number]
                router.expert_bias += rate * torch.sign(counts.mean() - counts).to(router.expert_bias)


def statistics(chunks: Sequence[PolicyChunk], counted: Sequence[Load], groups: Groups,
               real_tokens: int, old: Sequence[Load] | None = None) -> dict[str, float]:
    """Losses and loads of the experts in an optimizer step, the same on every trainer; {} for a dense model.

    Args:
        counted: per chunk of this rank, where the routers sent the step's tokens.
        real_tokens: of the step, prompts included.
        old: the same of the pass that filled in the old log-probs, whose disagreement with a replay is told; None:
            that of `counted`.
    Returns:
        moe/balance_loss and moe/z_loss (with their coefficients); by layer moe/load_max/<layer>, the busiest expert's
        share of tokens over its fair share, and moe/load_entropy/<layer>, 1 if all experts get as many; the worst of
        both without a layer; in a replay moe/routing_disagreement, the share of (token, layer) whose router would have
        chosen another set of experts, and by layer; and moe/replayed, the share of the step's that had a choice.
    """
    if not counted:
        return {}
    losses = torch.zeros(2, dtype=torch.float64, device=device.current())
    for chunk in chunks:
        losses += torch.stack((chunk.routers.balance, chunk.routers.z))
    dist.all_reduce(losses)
    layers = chunks[0].hf.moe_layers
    busiest, entropy, compared, differing = _by_layer(chunks, [torch.stack((
        load.fractions.max(-1).values * load.counts.size(-1), load.entropy, first.compared, first.differing))
        for load, first in zip(counted, counted if old is None else old, strict=True)], groups).tolist()
    values = {"moe/balance_loss": float(losses[0]), "moe/z_loss": float(losses[1]), "moe/load_max": max(busiest),
              "moe/load_entropy": min(entropy)}
    for layer, most, even, tokens, others in zip(layers, busiest, entropy, compared, differing, strict=True):
        values |= {f"moe/load_max/{layer}": most, f"moe/load_entropy/{layer}": even}
        if sum(compared):
            values[f"moe/routing_disagreement/{layer}"] = others / max(tokens, 1)
    if sum(compared):
        values |= {"moe/routing_disagreement": sum(differing) / sum(compared),
                   "moe/replayed": sum(compared) / (len(layers) * real_tokens)}
    return values


def entropies(chunks: Sequence[PolicyChunk], counted: Sequence[Load], groups: Groups) -> dict[int, float]:
    """Normalised load entropy by number of the model's layer, the same on every trainer."""
    found = _by_layer(chunks, [load.entropy[None] for load in counted], groups)
    return dict(zip(chunks[0].hf.moe_layers, found[0].tolist(), strict=True))


def _by_layer(chunks: Sequence[PolicyChunk], values: Sequence[torch.Tensor], groups: Groups) -> torch.Tensor:
    """Values [rows, layers here] of each chunk -> float64 [rows, MoE layers of the model], on every trainer."""
    hf = chunks[0].hf
    table = torch.zeros(len(values[0]), hf.layers, dtype=torch.float64, device=device.current())
    if groups.tp == groups.cp == groups.dp == 0:
        for chunk, one in zip(chunks, values, strict=True):
            table[:, list(chunk.routers.layers)] = one / groups.layout.mirrors
    dist.all_reduce(table)
    return table[:, list(hf.moe_layers)]
