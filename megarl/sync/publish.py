"""Publishing: every engine gets the trainers' weights, whole and by Hugging Face name, or the failure says who did not.

Trainer 0 speaks to the engines about the update as a whole: pause, drop caches, begin, end, version, continue. Between
begin and end the pipeline ranks take turns: all ranks that hold the same stages gather their tensors, and the source
among them (tensor, context and data rank 0) sends them in buckets. Turns, because an engine serves one bucket after the
other: two sources with two engines could each wait for the engine that serves the other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import torch
import torch.distributed as dist

from megarl.checkpoint.hf_export import is_source, iter_hf_tensors
from megarl.cluster import device
from megarl.config.schema import Config
from megarl.errors import MachineFault, UserMistake
from megarl.model.hf_config import HFConfig
from megarl.rollout.client import EngineClient, open_session
from megarl.rollout.fleet import EngineRecord, Fleet
from megarl.rollout.protocol import EngineError
from megarl.sync.background import EventLoop, all_well
from megarl.sync.broadcast import Broadcast
from megarl.sync.buckets import fill
from megarl.sync.checksum import tensor_checksum

T = TypeVar("T")


@dataclass(frozen=True)
class PublishReport:
    """What a publish did.

    Attributes:
        version: name of the weights that `engines` hold now.
        engines: all that were up when it began.
        tensors, bytes: that each engine got.
        seconds: the whole of it, from before the pause until all engines go on.
    """

    version: str
    engines: tuple[EngineRecord, ...]
    tensors: int
    bytes: int
    seconds: float


class WeightPublisher:
    """Sends the policy's weights to the fleet. Every trainer makes one and calls `publish` with the others.

    Args:
        chunks: this rank's chunks of the policy.
        hf: the model.
        config: used are sync, rollout.engine, sglang.tp_size.
        address: under which other hosts reach this one.
        generation: of this life of the job; in the names of the groups.
        fleet: the engines; on trainer 0 (elsewhere None). Publishing marks those that it reached there, and condemns
            those that it left half-way.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: HFConfig, config: Config, *, address: str,
                 generation: str, fleet: Fleet | None = None) -> None:
        from megatron.core import parallel_state

        sglang = config.rollout.engine == "sglang"
        if config.sync.verify and sglang:
            raise UserMistake("SGLang's checksums are of its own fused tensors and cannot be compared", "sync.verify",
                              "set it to false, or use rollout.engine: embedded")
        self._chunks, self._hf, self._sync = list(chunks), hf, config.sync
        self._address, self._generation, self._fleet = address, generation, fleet
        self._ranks_per_engine = int(config.sglang.get("tp_size", 1)) if sglang else 1
        self._patience_s = config.rollout.no_engine_timeout_s
        self._on_cpu = not sglang or device.kind() == "cpu"
        self._is_source = is_source()
        self._turn, self._turns = (parallel_state.get_pipeline_model_parallel_rank(),
                                   parallel_state.get_pipeline_model_parallel_world_size())
        self._engines: tuple[EngineRecord, ...] = ()
        self._clients: list[EngineClient] = []
        self._transport: Broadcast | None = None
        self._connections = 0
        self._sums: dict[str, str] = {}
        if self._is_source:
            self._loop = EventLoop("megarl publish")
            self._session = self._loop.run(_open())

    def publish(self, version: str) -> PublishReport:
        """Give the present weights to every engine that is up, under the name `version`. Collective over all trainers.

        The engines' requests go back into their queues meanwhile, and caches are dropped. If it fails after weights
        began to change, the engines are condemned (their supervisors restart them); the next publish makes new groups.

        Raises:
            MachineFault: on every trainer: an engine refused, died or did not answer in time (it is named), no engine
                is up, or, with `sync.verify`, an engine holds other weights than were sent (the tensors are named).
        """
        started = time.monotonic()
        engines = self._agree_on_engines()
        self._begun = False
        try:
            if engines != self._engines:
                self._connect(engines)
            self._tell(lambda client: client.pause("retract"), "pause")
            self._tell(EngineClient.flush, "drop caches")
            self._begun = True
            self._tell(EngineClient.begin_update, "begin an update")
            sent = [self._together(self._send if turn == self._turn else _nothing) for turn in range(self._turns)]
            self._tell(EngineClient.end_update, "end the update")
            if self._sync.verify:
                self._verify()
            self._tell(lambda client: client.set_version(version), "name the weights")
            self._tell(EngineClient.continue_, "continue")
        except BaseException as error:
            self._give_up(version, engines, str(error))
            raise
        if self._fleet is not None:
            self._fleet.mark_synced(version, engines)
        counts = torch.tensor([count or (0, 0) for count in sent], dtype=torch.int64, device=device.current()).sum(0)
        dist.all_reduce(counts)
        return PublishReport(version, engines, int(counts[0]), int(counts[1]), time.monotonic() - started)

    def close(self) -> None:
        """Leave the groups and stop the event loop, without telling the engines."""
        if self._transport is not None:
            self._transport.abandon()
            self._transport = None
        if self._is_source:
            self._loop.run(self._session.close())
            self._loop.close()

    def _agree_on_engines(self) -> tuple[EngineRecord, ...]:
        """Trainer 0's view of the fleet, on all trainers; waits for an engine that is starting again."""
        view = [self._together(self._wait_for_engines)]
        dist.broadcast_object_list(view, src=0)
        if not view[0]:
            raise MachineFault(f"no engine has been up for {self._patience_s:.0f} s to publish weights to")
        return view[0]

    def _wait_for_engines(self) -> tuple[EngineRecord, ...]:
        if self._fleet is None:
            return ()
        deadline = time.monotonic() + self._patience_s
        while not (found := tuple(self._fleet.engines())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _connect(self, engines: tuple[EngineRecord, ...]) -> None:
        """Make each source's group with the engines, one after the other: an engine joins one at a time."""
        self._together(lambda: self._leave(engines))
        self._engines, self._connections = engines, self._connections + 1
        if self._is_source:
            self._clients = [EngineClient(engine.url, self._session, control_timeout_s=self._sync.timeout_s, retries=1)
                             for engine in engines]
        for turn in range(self._turns):
            self._together(self._join if self._is_source and turn == self._turn else _nothing)

    def _leave(self, staying: tuple[EngineRecord, ...]) -> None:
        """Out of the old group, together with those of its engines that still are the same processes."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close({engine.url for engine in self._engines if engine in staying})

    def _join(self) -> None:
        self._transport = Broadcast(
            self._clients, self._loop, name=f"megarl-{self._generation}-{self._connections}-source{self._turn}",
            address=self._address, ranks_per_engine=self._ranks_per_engine, on_cpu=self._on_cpu,
            timeout_s=self._sync.timeout_s)

    def _send(self) -> tuple[int, int] | None:
        """This pipeline rank's turn; on its source the numbers of tensors and bytes that were sent."""
        tensors = iter_hf_tensors(self._chunks, self._hf)
        if not self._is_source:
            _run_out(tensors)
            return None
        count = size = 0
        self._sums = {}
        try:
            for bucket in fill(self._summed(tensors), self._sync.bucket_mb << 20, self._transport.device):
                self._transport.push(bucket)
                count, size = count + len(bucket.names), size + bucket.bytes
            self._transport.finish()
        except Exception:
            _run_out(tensors)  # the other ranks of the stage must not wait for this one in gathering
            raise
        return count, size

    def _summed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; their checksums are kept if they are to be verified."""
        for name, tensor in tensors:
            if self._sync.verify:
                self._sums[name] = tensor_checksum(tensor)
            yield name, tensor

    def _verify(self) -> None:
        """Compare every tensor's checksum on every engine with the one that its source computed."""
        sums: list[dict[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(sums, self._sums)
        sent = {name: value for part in sums for name, value in part.items()}

        async def check(client: EngineClient) -> None:
            held = (await client.checksums())["checksums"]
            wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
            if wrong:
                raise EngineError(f"{client.url}: {len(wrong)} of {len(sent)} tensors differ from what was sent: "
                                  + ", ".join(wrong[:5]) + (" ..." if len(wrong) > 5 else ""))

        self._tell(check, "verify the weights")

    def _tell(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]], what: str) -> None:
        """Trainer 0 makes this call to every engine at once; all trainers learn how it went."""
        everyone = f"have all engines {what}"
        self._together((lambda: self._loop.run(all_well([call(client) for client in self._clients], everyone)))
                       if dist.get_rank() == 0 else _nothing)

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's part of a phase; return when all trainers have done theirs, raise if one of them failed."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=device.current())
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed:
            reasons: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(reasons, failure and str(failure))
            raise failure or MachineFault("; ".join(reason for reason in reasons if reason))
        return result

    def _give_up(self, version: str, engines: tuple[EngineRecord, ...], why: str) -> None:
        """Forget the groups; hand engines whose weights are half old, half new to their supervisors."""
        if self._transport is not None:
            self._transport.abandon()
        self._transport, self._engines = None, ()
        if self._fleet is not None and self._begun:
            self._fleet.mark_synced(version, ())
            for engine in engines:
                self._fleet.condemn(engine, f"its weight update was cut short: {why}")


async def _open() -> aiohttp.ClientSession:
    return open_session()


def _nothing() -> None:
    """A rank's part of a phase in which it has none."""


def _run_out(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass
