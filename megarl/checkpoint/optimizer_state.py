"""The optimizer's state by parameter: fp32 master and both moments, under the parameter's name in the whole model.

Megarl writes these itself. Megatron-core's form of them is bound to the number of its chained optimizers (one without
expert parallelism, two with it) and to which parameters each buffer holds; keyed by parameter, a state fits every
layout. Each data-parallel rank has a piece of a parameter's state; the pieces are put together on one of them, in turn
for the parameters, so every rank keeps and writes about its share of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.cluster import device

KINDS = ("param", "exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state"


@dataclass(frozen=True)
class Piece:
    """What this rank has of a parameter's state.

    Attributes:
        parameter: of the model.
        main: fp32 [end - start], the master's elements, a leaf of the inner optimizer; None if this rank has none.
        optimizer: torch's (or the fused one) that holds the moments of `main`.
        start, end: the elements of the flat parameter that `main` stands for.
        gives: whether the whole is made with this piece; of equal copies one is.
        group: the ranks that have the other pieces.
        owner: the rank in `group` that keeps the whole.
    """

    parameter: torch.nn.Parameter
    main: torch.Tensor | None
    optimizer: torch.optim.Optimizer
    start: int
    end: int
    gives: bool
    group: dist.ProcessGroup
    owner: int

    @property
    def owned(self) -> bool:
        """Whether this rank keeps the whole."""
        return dist.get_rank(self.group) == self.owner

    def whole(self) -> torch.Tensor | None:
        """Master and moments of the whole parameter, fp32 [3, elements] in host memory; None off the owner.

        Collective over `group`. Bits are added as integers, of which all but one rank's are 0: nothing is rounded.
        """
        flat = torch.zeros(len(KINDS), self.parameter.numel(), dtype=torch.float32, device=device.current())
        if self.gives:
            state = {"param": self.main, **self.optimizer.state.get(self.main, {})}
            for row, kind in enumerate(KINDS):
                if kind in state:  # before the first step there are no moments: zeros
                    flat[row, self.start:self.end] = state[kind].detach().reshape(-1)
        if dist.get_world_size(self.group) > 1:
            dist.reduce(flat.view(torch.int32), dist.get_global_rank(self.group, self.owner), group=self.group)
        return flat.cpu() if self.owned else None

    @torch.no_grad()
    def put(self, flat: torch.Tensor | None, updates: int) -> None:
        """Take this rank's part of what the owner has, as after so many updates. Collective over `group`."""
        where = device.current()
        flat = (flat.to(where) if self.owned else
                torch.empty(len(KINDS), self.parameter.numel(), dtype=torch.float32, device=where))
        if dist.get_world_size(self.group) > 1:
            dist.broadcast(flat, dist.get_global_rank(self.group, self.owner), group=self.group)
        if self.main is None:
            return
        master, *moments = (row[self.start:self.end].view_as(self.main) for row in flat)
        self.main.copy_(master)
        state = self.optimizer.state[self.main]
        state |= {kind: moment.clone() for kind, moment in zip(KINDS[1:], moments, strict=True)}
        if isinstance(self.optimizer, torch.optim.Adam):  # AdamW is one; fused ones count in their groups
            state["step"] = torch.tensor(float(updates))


def pieces(inner: Any) -> list[Piece]:
    """This rank's pieces of all parameters that it shares in, in the same order on all ranks of a piece's group.

    Args:
        inner: Megatron-core's optimizer: one, or several chained; distributed or not.
    """
    found: list[Piece] = []
    for one in getattr(inner, "chained_optimizers", [inner]):
        if getattr(one, "is_stub_optimizer", False):
            continue
        for parameter, main, start, end, gives, group in _parts(one):
            owner = len(found) % dist.get_world_size(group)
            found.append(Piece(parameter, main, one.optimizer, start, end, gives, group, owner))
    return found


def _parts(one: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor | None, int, int, bool, dist.ProcessGroup]]:
    if hasattr(one, "model_param_group_index_map"):  # distributed: a parameter is cut at any element
        for parameter in (parameter for buffer in one.buffers for parameter in buffer.param_index_map):
            main, start, end = None, 0, 0
            if parameter in one.model_param_group_index_map:
                group, order = one.model_param_group_index_map[parameter]
                main = one.optimizer.param_groups[group]["params"][order]
                here = one._get_model_param_range_map(parameter)["param"]
                start, end = here.start, here.end
            yield parameter, main, start, end, main is not None, one.data_parallel_group
        return
    from megatron.core import parallel_state

    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for parameter in one.get_parameters() if not hasattr(one, "float16_groups") else sum(
            one.float16_groups + one.fp32_from_fp32_groups, []):
        main = getattr(parameter, "main_param", None)
        group = dense if getattr(parameter, "allreduce", True) else experts
        yield (parameter, parameter if main is None else main, 0, parameter.numel(), dist.get_rank(group) == 0, group)


def set_step(inner: Any, updates: int) -> None:
    """Tell fused optimizers, which count in their parameter groups, how many updates were done."""
    for one in getattr(inner, "chained_optimizers", [inner]):
        if not isinstance(one.optimizer, torch.optim.Adam):
            for group in one.optimizer.param_groups:
                if group["params"]:
                    group["step"] = updates
