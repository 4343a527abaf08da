"""Samples from the leaders that sampled them to the ranks that train them. Plain tensors, sizes known beforehand."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.cluster.groups import Groups, from_leader
from megarl.data.ragged import META_COLUMNS, SampleBatch
from megarl.data.routing import RoutingShape
from megarl.data.table import SampleTable


def gather_table(local: SampleBatch | None, groups: Groups) -> SampleTable:
    """The experience's table on every trainer, from what each leader sampled. Collective over the trainers.

    Args:
        local: this leader's samples, scored; ignored on other ranks.
        groups: this trainer's groups.
    """
    sizes = torch.zeros(groups.layout.data, dtype=torch.int64)
    if groups.is_leader:
        sizes[groups.dp] = len(local)
        sizes = sizes.to(device.current())
        dist.all_reduce(sizes, group=groups.leaders)
    sizes = from_leader(sizes.to(device.current()), groups).tolist()
    metas = torch.zeros(groups.layout.data, max(sizes), META_COLUMNS, dtype=torch.int64, device=device.current())
    if groups.is_leader:
        metas[groups.dp, : len(local)] = local.to_wire()[0].to(metas.device)
        dist.all_reduce(metas, group=groups.leaders)  # each row is set by one leader, zero elsewhere
    metas = from_leader(metas, groups).cpu().numpy()
    rows = np.concatenate([metas[owner, :size] for owner, size in enumerate(sizes)])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
    column = np.ascontiguousarray(rows[order].T)
    return SampleTable(position=column[0], n=column[1], part=column[2], prompt_tokens=column[3],
                       response_tokens=column[4], trained_tokens=column[5], reward=column[6].view(np.float64),
                       truncated=column[7].astype(bool), owner=owner[order], row=row[order])


def exchange(local: SampleBatch | None, table: SampleTable, target: np.ndarray, groups: Groups,
             routing: RoutingShape | None = None) -> tuple[SampleBatch, np.ndarray]:
    """Move every sample to the data-parallel rank that trains it. Collective over the trainers.

    Args:
        local: this leader's samples, as `gather_table` saw them; ignored on other ranks.
        table: of the experience.
        target: int64 [N], the dp coordinate that trains each sample; -1 for nobody.
        groups: this trainer's groups.
        routing: of the model, if the engine's routing is replayed: the samples' experts go along.

    Returns:
        (samples of this rank's block, equal on all of its ranks; their numbers in the table, ascending).
    """
    numbers = np.concatenate([np.flatnonzero((table.owner == owner) & (target == groups.dp))
                              for owner in range(groups.layout.data)])
    tokens, answers = int(table.lengths[numbers].sum()), int(table.response_tokens[numbers].sum())
    where = device.current()
    wire = (torch.empty(len(numbers), META_COLUMNS, dtype=torch.int64, device=where),
            torch.empty(tokens, dtype=torch.int64, device=where),
            torch.empty(answers, 2, dtype=torch.float32, device=where),
            torch.empty(answers, dtype=torch.int32, device=where))
    if routing:
        wire = (*wire, torch.empty(tokens, routing.token_bytes, dtype=torch.uint8, device=where))
    if groups.is_leader:
        parcels = [local.select(table.row[(table.owner == groups.dp) & (target == to)])
                   for to in range(groups.layout.data)]
        outgoing = [(*parcel.to_wire(), *((parcel.experts_to_wire(routing),) if routing else ()))
                    for parcel in parcels]
        for part in range(len(wire)):
            sent = torch.cat([parts[part] for parts in outgoing]).to(where)
            dist.all_to_all_single(wire[part], sent, _incoming(table, target, groups, part),
                                   [len(parts[part]) for parts in outgoing], group=groups.leaders)
    received = [from_leader(tensor, groups) for tensor in wire]
    arrived = SampleBatch.from_wire(*received[:4])
    if routing:
        arrived = arrived.with_experts(received[4], routing)
    order = np.argsort(numbers)
    return arrived.select(order), numbers[order]


def _incoming(table: SampleTable, target: np.ndarray, groups: Groups, part: int) -> list[int]:
    """How many entries of wire tensor `part` arrive here from each leader."""
    per_sample = (np.ones_like(table.row), table.lengths, table.response_tokens, table.response_tokens,
                  table.lengths)[part]
    mine = target == groups.dp
    return [int(per_sample[mine & (table.owner == owner)].sum()) for owner in range(groups.layout.data)]
