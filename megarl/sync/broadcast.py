"""The broadcast transport: buckets from each stage's source to sets of engines over process groups made for them.

gloo between CPUs, NCCL between GPUs. The source trainer is rank 0 and hosts the group's store itself, so that nothing
depends on how the job was launched (under torchrun a `tcp://` group would look for torchrun's own store). The group's
name and the nesting of its stores are those that SGLang's `init_custom_process_group` makes on the other side.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _new_process_group_helper, _world

from megarl.cluster import device
from megarl.errors import MachineFault
from megarl.rollout.client import EngineClient
from megarl.rollout.fleet import EngineRecord
from megarl.rollout.protocol import InitGroup, UpdateBucket
from megarl.sync.background import EventLoop, all_well, in_thread
from megarl.sync.buckets import Bucket, fill
from megarl.sync.crew import Crew, Targets
from megarl.sync.sets import EngineSet, rounds
from megarl.sync.transport import Sent, Tensors, run_out

log = logging.getLogger(__name__)


class Broadcast:
    """One group for each source and set of engines; who sends to whom when, `sets.rounds` says.

    Args:
        crew: the trainers.
        stage, stages: this rank's pipeline stage, and how many there are.
        is_source: whether this rank sends.
        name: of this life of the job; begins the groups' names.
        address: under which the engines reach this host.
        ranks_per_engine: tensor-parallel processes of each engine, each a rank of a group.
        on_cpu: the engines hold their weights on CPU.
        bucket_bytes: sent at a time.
        timeout_s: of joining a group and of every bucket.
    """

    session = True

    def __init__(self, crew: Crew, *, stage: int, stages: int, is_source: bool, name: str, address: str,
                 ranks_per_engine: int, on_cpu: bool, bucket_bytes: int, timeout_s: float) -> None:
        self._crew, self._stage, self._stages, self._is_source = crew, stage, stages, is_source
        self._name, self._address, self._ranks_per_engine = name, address, ranks_per_engine
        self._on_cpu, self._bucket_bytes, self._timeout_s = on_cpu, bucket_bytes, timeout_s
        self._joined: set[int] = set()
        self._links: dict[int, Link] = {}

    def prepare(self, version: str, tensors: Tensors) -> None:
        """Tensors are gathered as they are sent: nothing."""

    def connect(self, targets: Targets) -> None:
        """Make the groups of sets that have none. An engine joins one at a time."""
        new = [one for one in targets.sets if one.number not in self._joined]
        for row in rounds(self._stages, new) if new else []:
            mine = [one for one in row[self._stage] if one.number not in targets.failed and self._is_source]
            self._crew.per_set(targets, lambda failed, mine=mine: self._join(mine, failed))
        self._joined |= {one.number for one in new}

    def _join(self, sets: Sequence[EngineSet], failed: dict[int, str]) -> None:
        joining = [(one, in_thread(lambda one=one: self._link(one), f"join set {one.number}")) for one in sets]
        for one, link in joining:
            try:
                self._links[one.number] = link.result()
            except MachineFault as error:
                failed[one.number] = str(error)

    def _link(self, one: EngineSet) -> Link:
        return Link([self._crew.client(engine) for engine in one.engines], self._crew.loop,
                    name=f"{self._name}-set{one.number}-source{self._stage}", address=self._address,
                    ranks_per_engine=self._ranks_per_engine, on_cpu=self._on_cpu, timeout_s=self._timeout_s)

    def send(self, targets: Targets, tensors: Tensors) -> Sent:
        """In each round this stage gathers its tensors for the sets whose turn it is."""
        sent = Sent()
        for row in rounds(self._stages, targets.sets):
            mine = [one for one in row[self._stage] if one.number not in targets.failed]
            sent = max(sent, self._crew.per_set(
                targets, lambda failed, mine=mine: self._send(mine, tensors, failed) if mine else Sent()))
        return sent

    def _send(self, sets: Sequence[EngineSet], tensors: Tensors, failed: dict[int, str]) -> Sent:
        """Every bucket to each of the sets; one that fails gets no more, the others go on."""
        gathered = tensors()
        if not self._is_source:
            run_out(gathered)
            return Sent()
        links = {one.number: self._links[one.number] for one in sets}
        count = size = 0

        def each(act: Callable[[Link], None]) -> None:
            for number, link in list(links.items()):
                try:
                    act(link)
                except MachineFault as error:
                    failed[number] = str(error)
                    del links[number]

        try:
            for bucket in fill(gathered, self._bucket_bytes, next(iter(links.values())).device):
                each(lambda link, bucket=bucket: link.push(bucket))
                count, size = count + len(bucket.names), size + bucket.bytes
                if not links:
                    break
            each(Link.finish)
        finally:
            run_out(gathered)
        return Sent(count, size)

    def leave(self, sets: Sequence[EngineSet], engines: Collection[EngineRecord]) -> None:
        """Out of these sets' groups, together with `engines`."""
        staying = {engine.key for engine in engines}

        def work() -> None:
            for one in sets:
                self._joined.discard(one.number)
                if link := self._links.pop(one.number, None):
                    try:
                        link.close({engine.url for engine in one.engines if engine.key in staying})
                    except MachineFault as error:  # it keeps a group whose name nobody will use again
                        log.warning("%s", error)

        self._crew.together(work)

    def close(self) -> None:
        """Leave all groups without telling the engines."""
        for link in self._links.values():
            link.abandon()
        self._links = {}


class Link:
    """A group of this trainer and the engines of `clients`, through which buckets go one after the other.

    Making it blocks until every engine has joined. Whatever may block for long runs in threads of its own, so an
    engine's refusal is raised at once, although the thread then stays in the orphaned call until the timeout.

    Args:
        clients: of the engines, in the order of their ranks.
        loop: where the clients' session lives.
        name: of the group; never used before by any of these engines.
        address: under which the engines reach this host.
        ranks_per_engine: tensor-parallel processes of each engine, each a rank of the group.
        on_cpu: the engines hold their weights on CPU.
        timeout_s: of joining and of every bucket.
    Attributes:
        device: where buckets must lie.
    Raises:
        MachineFault: an engine refused, died or did not come in time; named.
    """

    def __init__(self, clients: Sequence[EngineClient], loop: EventLoop, *, name: str, address: str,
                 ranks_per_engine: int, on_cpu: bool, timeout_s: float) -> None:
        self.device = torch.device("cpu") if on_cpu else device.current()
        self._clients, self._loop, self._name, self._timeout_s = list(clients), loop, name, timeout_s
        self._backend = "gloo" if on_cpu else "nccl"
        self._arriving: Future[None] | None = None
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        size = 1 + ranks_per_engine * len(self._clients)
        joining = in_thread(lambda: self._join(size, timeout), f"join {name}")
        invitations = [InitGroup(address, self._store.port, 1 + ranks_per_engine * number, size, name, self._backend)
                       for number in range(len(self._clients))]
        posts = [client.init_group(invitation, timeout_s=timeout_s)
                 for client, invitation in zip(self._clients, invitations, strict=True)]
        loop.run(all_well([*posts, _await(joining)], f"make the group {name}"))
        self._group = joining.result()

    def _join(self, size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
        """SGLang's layers of prefixes: the name here, the name with a slash inside the helper.

        NCCL's watchdog ends the process at a timeout: an engine's own must come first, and name the engine.
        """
        if self._backend == "nccl":
            timeout *= 2
        group, _ = _new_process_group_helper(size, 0, [], dist.Backend(self._backend),
                                             dist.PrefixStore(self._name, self._store), group_name=self._name,
                                             timeout=timeout)
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        return group

    def push(self, bucket: Bucket) -> None:
        """Send a bucket on its way; returns when the one before it has arrived.

        Raises:
            MachineFault: the one before was refused, or an engine died; named. Nothing more can be sent.
        """
        self.finish()
        device.synchronize()  # the bucket is filled; the sending thread does not share this one's stream
        dtype = str(bucket.dtype).removeprefix("torch.")
        message = UpdateBucket(tuple(bucket.names), (dtype,) * len(bucket.names), tuple(bucket.shapes), self._name,
                               load_format="flattened_bucket", flush_cache=False)
        self._arriving = self._loop.start(self._send(message, bucket.storage[:bucket.bytes]))

    async def _send(self, message: UpdateBucket, flat: torch.Tensor) -> None:
        posts = [client.update_bucket(message, timeout_s=self._timeout_s) for client in self._clients]
        sending = in_thread(lambda: self._broadcast(flat), f"broadcast {self._name}")
        await all_well([*posts, _await(sending)], f"send {len(message.names)} tensors from {message.names[0]} on")

    def _broadcast(self, flat: torch.Tensor) -> None:
        if not flat.is_cuda:
            dist.broadcast(flat, src=0, group=self._group)
            return
        # A thread begins with the main thread's stream, which must not queue up behind an engine that does not come.
        stream = torch.cuda.Stream(flat.device)
        with torch.cuda.stream(stream):  # also switches to its device
            dist.broadcast(flat, src=0, group=self._group)
        stream.synchronize()

    def finish(self) -> None:
        """Wait until the last bucket has arrived. Raises as `push` does."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.result()

    def close(self, urls: set[str]) -> None:
        """Leave the group, and have the engines at `urls` leave it."""
        self.abandon()
        self._loop.run(all_well([client.destroy_group(self._name) for client in self._clients if client.url in urls],
                                f"leave the group {self._name}"))

    def abandon(self) -> None:
        """Leave the group without telling the engines. NCCL would wait for what is under way: it is aborted."""
        (_abort_process_group if self._backend == "nccl" else dist.destroy_process_group)(self._group)


async def _await(future: Future) -> None:
    await asyncio.wrap_future(future)
