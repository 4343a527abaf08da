"""The trainers' process groups: Megatron-core's parallel_state, and the few that megarl adds to it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.config.layout import Layout


@dataclass(frozen=True)
class Groups:
    """This trainer's coordinates and the groups beside Megatron-core's.

    A *block* is the tensor x context x pipeline ranks of one data-parallel rank; its first rank is its *leader*.

    Attributes:
        layout: the degrees.
        tp, cp, dp, pp: this rank's coordinates.
        block: the ranks that train the same samples; global ranks in `block_ranks`, the leader first.
        leaders: all leaders, in order of their dp coordinate; None on other ranks.
        pipeline_ranks: global ranks of this pipeline, in order of their pp coordinate.
    """

    layout: Layout
    tp: int
    cp: int
    dp: int
    pp: int
    block: dist.ProcessGroup
    block_ranks: tuple[int, ...]
    leaders: dist.ProcessGroup | None
    pipeline_ranks: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """Whether this rank draws prompts and holds samples for its block."""
        return self.tp == self.cp == self.pp == 0


def start_trainers(layout: Layout, rank: int, store: dist.Store, timeout_s: float, seed: int) -> Groups:
    """Make the trainers' default group over `store`, then every group of the layout.

    The default group holds trainers only, because Megatron-core takes its size as the world.

    Args:
        layout: degrees; `layout.world` trainers.
        rank: this trainer's rank.
        store: any store all trainers share; keys go under "trainers/".
        timeout_s: of every collective.
        seed: of Megatron-core's RNG tracker.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(device.backend(), store=dist.PrefixStore("trainers", store), rank=rank,
                            world_size=layout.world, timeout=timeout)
    dist.all_reduce(torch.zeros(1, device=device.current()))  # NCCL connects in its first operation, on its device
    return make_groups(layout, timeout, seed)


def make_groups(layout: Layout, timeout: datetime.timedelta, seed: int) -> Groups:
    """Every group of `layout` over the present default group (tests go through several layouts in one world)."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline // layout.mirrors,
        context_parallel_size=layout.context, expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor, create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)))
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    tp, cp, dp, pp = coordinates(layout, dist.get_rank())
    block, ranks = None, ()
    for number in range(layout.data):  # every rank takes part in making every group
        members = block_members(layout, number)
        group = dist.new_group(members, timeout=timeout)
        if number == dp:
            block, ranks = group, tuple(members)
    leaders = dist.new_group([block_members(layout, number)[0] for number in range(layout.data)], timeout=timeout)
    is_leader = tp == cp == pp == 0
    return Groups(layout, tp, cp, dp, pp, block, ranks, leaders if is_leader else None,
                  pipeline_members(layout, dist.get_rank()))


def coordinates(layout: Layout, rank: int) -> tuple[int, int, int, int]:
    """(tp, cp, dp, pp) of a trainer.

    Tensor runs fastest, then context, data, pipeline, as in Megatron-core; where stages are mirrored, the second half
    of each pipeline lies backwards beside the first, as further data-parallel ranks.
    """
    rank, tp = divmod(rank, layout.tensor)
    rank, cp = divmod(rank, layout.context)
    rank, dp = divmod(rank, layout.data)
    pp, mirror = divmod(rank, layout.mirrors)
    return tp, cp, dp, layout.pipeline - 1 - pp if mirror else pp


def pipeline_members(layout: Layout, rank: int) -> tuple[int, ...]:
    """Global ranks of the pipeline that `rank` is in, by their pp coordinate."""
    tp, cp, dp, _ = coordinates(layout, rank)
    places = {coordinates(layout, other): other for other in range(layout.world)}
    return tuple(places[tp, cp, dp, pp] for pp in range(layout.pipeline))


def block_members(layout: Layout, dp: int) -> list[int]:
    """Global ranks of data-parallel rank `dp`, ascending; the first is its leader."""
    return [rank for rank in range(layout.world) if coordinates(layout, rank)[2] == dp]


def sum_named(values: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum each value over `group` (all trainers if None); every rank has the same names in the same order."""
    totals = torch.tensor(list(values.values()), dtype=torch.float64, device=device.current())
    dist.all_reduce(totals, group=group)
    return dict(zip(values, totals.tolist(), strict=True))


def from_leader(tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Broadcast the block leader's tensor to its block, in place; every rank has one of the same shape."""
    if len(groups.block_ranks) > 1:
        dist.broadcast(tensor, groups.block_ranks[0], group=groups.block)
    return tensor
