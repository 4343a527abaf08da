"""Coordinates, blocks and leaders against Megatron-core's own parallel_state."""

from __future__ import annotations

import datetime

from worlds import run_world

from megarl.config.layout import Layout

LAYOUTS = [
    Layout(8, tensor=2, pipeline=2, context=2, sequence=True),
    Layout(8, tensor=2, expert=4, sequence=True),
    Layout(8, tensor=2, pipeline=2, expert=2, sequence=True),
    Layout(8, context=4),
    Layout(8, pipeline=4, expert=2),
]


def _compare(rank: int) -> list[str]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    from megarl.cluster.groups import make_groups

    wrong = []
    for layout in LAYOUTS:
        groups = make_groups(layout, datetime.timedelta(seconds=60), seed=1)
        ours = (groups.tp, groups.cp, groups.dp, groups.pp)
        theirs = (ps.get_tensor_model_parallel_rank(), ps.get_context_parallel_rank(), ps.get_data_parallel_rank(),
                  ps.get_pipeline_model_parallel_rank())
        if ours != theirs:
            wrong.append(f"{layout}: rank {rank} is {ours}, Megatron says {theirs}")
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=groups.block)
        if total.item() != sum(groups.block_ranks) or rank not in groups.block_ranks:
            wrong.append(f"{layout}: block of {rank} is {groups.block_ranks}")
        if groups.is_leader:
            count = torch.ones(1)
            dist.all_reduce(count, group=groups.leaders)
            if count.item() != layout.data or groups.block_ranks[0] != rank:
                wrong.append(f"{layout}: leader {rank} of {groups.block_ranks}")
        ps.destroy_model_parallel()
    return wrong


def _wait_long(rank: int) -> list[int]:
    import time

    import torch
    import torch.distributed as dist

    from megarl.cluster.store import Meeting

    place = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None]
    port = [place[0].port if rank == 0 else 0]
    dist.broadcast_object_list(port)
    meet = Meeting(place[0] or dist.TCPStore("127.0.0.1", port[0], is_master=False), 2)
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=1))
    sums = []
    for late in (1, 0):
        if rank == late:
            time.sleep(3)
        meet()
        total = torch.tensor([rank + 1])
        dist.all_reduce(total, group=impatient)
        sums.append(int(total))
    return sums


def test_a_meeting_waits_longer_than_a_collective():
    assert run_world(2, _wait_long) == [[3, 3]] * 2


def test_groups_agree_with_megatron():
    assert run_world(8, _compare) == [[]] * 8
