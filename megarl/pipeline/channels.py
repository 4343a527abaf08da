"""Tensors between pipeline ranks: planned shapes, one communicator for activations and one for gradients, no tags."""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl.cluster import device
from megarl.errors import MachineFault
from megarl.pipeline.schedule import Transfer

_BATCHES_IN_FLIGHT = 16

Message = tuple[Transfer, torch.Tensor]


class Channels:
    """Exchanges between the ranks of one pipeline; nothing to do for one rank.

    Making it is collective over all trainers, each with its own pipeline, if there is more than one rank in it.

    Args:
        members: global ranks of this pipeline, in its order.
        timeout_s: of every exchange.

    Everything runs behind: a receive is waited for where its tensor is needed, a send once a number of later ones are
    under way, which bounds the memory that sends keep alive. (gloo's are complete only when the peer has received, so a
    blocking send on both sides would deadlock.) That is safe for every schedule that `check` passes, since it replays
    with exchanges that block at once.
    """

    def __init__(self, members: Sequence[int], timeout_s: float) -> None:
        self.members = tuple(members)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._sending: deque[tuple[list[dist.Work], list[Message]]] = deque()
        self._receiving: dict[Transfer, tuple[list[dist.Work], torch.Tensor]] = {}
        if len(self.members) > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            everyones: list[tuple[int, ...]] = [()] * dist.get_world_size()
            dist.all_gather_object(everyones, self.members)
            for ranks in sorted(set(everyones)):  # every rank takes part in making every group
                for kind in ("activation", "gradient"):
                    made = dist.new_group(sorted(ranks), timeout=timeout)
                    if ranks == self.members:
                        self._groups[kind] = made
            for made in self._groups.values():  # NCCL connects in the first operation, which all members must join
                dist.all_reduce(torch.zeros(1, device=device.current()), group=made)

    def agree(self, plan: int) -> None:
        """Refuse to start where ranks plan different messages: gloo takes a short message for a long one silently.

        Args:
            plan: a digest of what this rank will send and receive.
        """
        if self._groups:
            ends = torch.tensor([plan, -plan], dtype=torch.int64, device=device.current())
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups["activation"])
            if ends[0] != -ends[1]:
                raise RuntimeError("the pipeline's ranks plan different shapes, schedules or numbers of micro-batches")

    def exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Begin one exchange of a schedule; the tensors of `receives` may be used after `receive`.

        Raises:
            MachineFault: a peer is lost or did not come within the timeout.
        """
        for kind, group in self._groups.items():
            incoming = [message for message in receives if message[0].kind == kind]
            outgoing = [message for message in sends if message[0].kind == kind]
            ops = [dist.P2POp(dist.irecv, tensor, self.members[transfer.source], group)
                   for transfer, tensor in incoming]
            ops += [dist.P2POp(dist.isend, tensor, self.members[transfer.target], group)
                    for transfer, tensor in outgoing]
            if ops:
                works = dist.batch_isend_irecv(ops)
                if len(works) < len(ops):  # NCCL gives one work for all of them
                    works = works[:1] * len(ops)
                self._receiving |= {transfer: ([work], tensor) for (transfer, tensor), work in
                                    zip(incoming, works, strict=False)}
                if outgoing:
                    self._sending.append((works[len(incoming):], outgoing))
        self._finish(_BATCHES_IN_FLIGHT)

    def receive(self, transfer: Transfer) -> torch.Tensor:
        """Wait for a transfer of an earlier exchange (on NCCL: later work of the stream waits).

        Raises:
            MachineFault: a peer is lost or did not come within the timeout.
        """
        works, tensor = self._receiving.pop(transfer)
        _wait(works, [(transfer, tensor)])
        return tensor

    def drain(self) -> None:
        """Wait until every send has been received."""
        assert not self._receiving, "a schedule received what no operation needs"
        self._finish(0)

    def _finish(self, leave: int) -> None:
        while len(self._sending) > leave:
            _wait(*self._sending.popleft())


def _wait(works: list[dist.Work], messages: list[Message]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        what = ", ".join(str(transfer) for transfer, _ in messages)
        raise MachineFault(f"the pipeline could not exchange the {what}: {str(error).splitlines()[0]}") from error
