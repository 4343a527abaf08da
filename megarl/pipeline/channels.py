"""Tensors between pipeline ranks: planned shapes, one communicator for activations and one for gradients, no tags."""

from __future__ import annotations

import datetime
from collections import deque

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.errors import MachineFault
from megarl.pipeline.schedule import Transfer

_EXCHANGES_IN_FLIGHT = 4

Message = tuple[Transfer, torch.Tensor]


class Channels:
    """Exchanges between the ranks of one pipeline; nothing to do for one rank.

    Making it is collective over all trainers, each with its own pipeline's `group`, if there is more than one stage.

    A receive is complete when `exchange` returns (on NCCL: before later work of the stream). Sends run behind: gloo's
    are complete only when the peer has received, so a blocking send on both sides would deadlock. At most a few
    exchanges stay unfinished, which bounds the memory that they keep alive and is safe for every schedule that `check`
    passes, since it replays with sends that block at once.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.size = group.size() if group else 1
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._unfinished: deque[tuple[list[dist.Work], list[Message]]] = deque()
        if self.size > 1:
            mine, timeout = tuple(dist.get_process_group_ranks(group)), datetime.timedelta(seconds=timeout_s)
            everyones: list[tuple[int, ...]] = [()] * dist.get_world_size()
            dist.all_gather_object(everyones, mine)
            for members in sorted(set(everyones)):  # every rank takes part in making every group
                for kind in "FB":
                    made = dist.new_group(list(members), timeout=timeout)
                    if members == mine:
                        self._groups[kind] = made
            for made in self._groups.values():  # NCCL connects in the first operation, which all members must join
                dist.all_reduce(torch.zeros(1, device=device.current()), group=made)

    def agree(self, plan: int) -> None:
        """Refuse to start where ranks plan different messages: gloo takes a short message for a long one silently.

        Args:
            plan: a digest of what this rank will send and receive.
        """
        if self.size > 1:
            ends = torch.tensor([plan, -plan], dtype=torch.int64, device=device.current())
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups["F"])
            if ends[0] != -ends[1]:
                raise RuntimeError("the pipeline's ranks plan different shapes, schedules or numbers of micro-batches")

    def exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Run one exchange of a schedule; the tensors of `receives` are filled in place.

        Raises:
            MachineFault: a peer is lost or did not come within the timeout.
        """
        waits: list[tuple[list[dist.Work], list[Message]]] = []
        for kind, group in self._groups.items():
            incoming = [message for message in receives if message[0].op.kind == kind]
            outgoing = [message for message in sends if message[0].op.kind == kind]
            ops = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=transfer.source)
                   for transfer, tensor in incoming]
            ops += [dist.P2POp(dist.isend, tensor, group=group, group_peer=transfer.target)
                    for transfer, tensor in outgoing]
            if ops:
                works = dist.batch_isend_irecv(ops)  # NCCL gives one work for all of them
                waits.append((works[:len(incoming)], incoming))
                self._unfinished.append((works[len(incoming):], outgoing))
        for works, messages in waits:
            _wait(works, messages)
        self._finish(_EXCHANGES_IN_FLIGHT)

    def drain(self) -> None:
        """Wait until every send has been received."""
        self._finish(0)

    def _finish(self, leave: int) -> None:
        while len(self._unfinished) > leave:
            _wait(*self._unfinished.popleft())


def _wait(works: list[dist.Work], messages: list[Message]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        what = ", ".join(str(transfer) for transfer, _ in messages)
        raise MachineFault(f"the pipeline could not exchange the {what}: {str(error).splitlines()[0]}") from error
