"""Publishing: engines get the trainers' weights, whole and by Hugging Face name, or do not serve.

Trainer 0 speaks to the engines about the update as a whole: pause, drop caches, begin, end, version, continue. In
between a transport brings the tensors: all ranks that hold the same pipeline stages gather them, and the source among
them (tensor, context and data rank 0) sends. Engines are updated in sets. If one fails, its whole set may hold parts
of two versions: the set is condemned (its supervisors restart it), the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from megarl.checkpoint.hf_export import is_source, iter_hf_tensors
from megarl.config.schema import Config
from megarl.errors import MachineFault
from megarl.model.hf_config import HFConfig
from megarl.rollout.client import EngineClient, EngineRefused
from megarl.rollout.fleet import EngineRecord, Fleet
from megarl.rollout.protocol import EngineError
from megarl.sync import verify
from megarl.sync.background import in_thread
from megarl.sync.checksum import tensor_checksum
from megarl.sync.choose import make_transport
from megarl.sync.crew import Crew, Targets
from megarl.sync.sets import EngineSet, assign
from megarl.sync.transport import Sent, Tensors

IDLE_POLL_S = 0.05

Pause = Literal["retract", "in_place", "abort", "finish"]
Found = tuple[list[EngineRecord], dict[tuple[str, int], str]]  # engines, and the weights they hold by their keys


@dataclass(frozen=True)
class PublishReport:
    """What an update did.

    Attributes:
        version: name of the weights that `engines` hold now.
        engines: those that took them.
        tensors: that each engine got.
        bytes: that travelled to each engine; where they differ (delta), to the one that got most.
        seconds: the whole of it, from the search for engines until all go on.
        paused_s: of which the engines did not generate.
        caches_kept: the engines go on with keys and values of the old weights (pause in_place).
        lost: engines that failed, with the reason; they are being restarted.
    """

    version: str
    engines: tuple[EngineRecord, ...]
    tensors: int
    bytes: int
    seconds: float
    paused_s: float = 0.0
    caches_kept: bool = False
    lost: dict[EngineRecord, str] = field(default_factory=dict)


class WeightPublisher:
    """Sends the policy's weights to the fleet. Every trainer makes one and makes the same calls.

    Args:
        chunks: this rank's chunks of the policy.
        hf: the model.
        config: used are sync, run.dir, model, rollout, sglang, cluster.timeout_s.
        address: under which other hosts reach this one.
        generation: of this life of the job; in the names of the groups.
        fleet: the engines; on trainer 0 (elsewhere None). Publishing marks those that it reached there, and condemns
            those that it left half-way. Nobody else may use it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: HFConfig, config: Config, *, address: str,
                 generation: str, fleet: Fleet | None = None) -> None:
        self._chunks, self._hf, self._config, self._fleet = list(chunks), hf, config, fleet
        patience_s = config.cluster.timeout_s + config.rollout.no_engine_timeout_s + config.rollout.request_timeout_s
        self._crew = Crew(is_source(), patience_s, config.sync.timeout_s, config.cluster.timeout_s)
        self._transport = make_transport(config, self._crew, address, generation)
        self._sets: list[EngineSet] = []
        self._next_set = 1
        self._version = self._digest = ""
        self._holders: dict[tuple[str, int], EngineRecord] = {}
        self._condemned: set[tuple[str, int]] = set()
        self._sums: dict[str, str] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._pending: Future[PublishReport] | None = None

    def publish(self, version: str, pause: Pause = "retract") -> PublishReport:
        """Give the present weights to every engine that is up, under the name `version`. Collective over all trainers.

        Args:
            version: `<generation>:<n>`.
            pause: what becomes of requests that run meanwhile. retract: they go back into their queues, caches are
                dropped; in_place: they are frozen, and go on with the old keys and values; abort: they end; finish:
                the engines first get through what they have (whoever asks them should hold back new requests),
                for `rollout.request_timeout_s` at most.
        Raises:
            MachineFault: on every trainer: no engine took the weights in rollout.no_engine_timeout_s; what failed is
                named.
        """
        self.start(version, pause)
        return self.finish()

    def start(self, version: str, pause: Pause = "retract") -> None:
        """The same, but with `sync.overlap` this returns as soon as the weights were copied, and a thread goes on.

        Whatever was started before is finished first.
        """
        self.finish()
        self._crew.muster()
        if self._config.sync.overlap:
            tensors = self._snapshot()
            self._pending = in_thread(lambda: self._publish(version, tensors, pause), "publish")
        else:
            report = self._publish(version, self._gathered, pause)
            self._pending = Future()
            self._pending.set_result(report)

    def finish(self) -> PublishReport | None:
        """Wait for what was started, and raise if it failed; None if nothing was. Collective over all trainers."""
        pending, self._pending = self._pending, None
        return pending and pending.result()

    def done(self) -> bool:
        """Whether what was started has come to its end (or failed, which `finish` tells)."""
        return self._pending is None or self._pending.done()

    def behind(self) -> bool:
        """On trainer 0: whether an engine is up that lacks the present weights."""
        return self.done() and any(engine.key not in self._holders and engine.key not in self._condemned
                                   for engine in self._fleet.engines())

    def catch_up(self) -> PublishReport | None:
        """Give the present weights to engines that came up since the last publish, under its version, and to no
        others. Collective over all trainers; the policy must not have changed since. None if there are no such
        engines. Raises nothing for an engine's failure: it is restarted, and catches up the next time.
        """
        self.finish()
        engines, held = self._crew.from_zero(self._crew.together(self._newcomers))
        if not engines or not self._version:
            return None
        begun = time.monotonic()
        targets = Targets(self._new_sets((), engines), held)
        tensors = (lambda: iter(self._spare.items())) if self._config.sync.overlap else self._gathered
        sent, paused_s = self._update(self._version, targets, tensors, "retract")
        self._transport.leave(targets.all, targets.engines)
        self._settle(targets)
        return self._report(targets.engines, sent, begun, paused_s, "retract", targets.lost)

    def close(self) -> None:
        """Leave the groups and stop speaking to engines, without telling them."""
        self._transport.close()
        self._crew.close()

    def _publish(self, version: str, tensors: Tensors, pause: Pause) -> PublishReport:
        begun, lost, failed_at = time.monotonic(), {}, None
        self._version, self._sums, self._digest = version, {}, ""
        while True:
            wait = partial(self._wait_for_engines, failed_at)
            engines, held = self._crew.from_zero(self._crew.together(wait))
            if not engines:
                break
            sets = self._new_sets(self._sets, engines)
            self._transport.leave([old for old in self._sets if old not in sets], engines)
            targets = Targets(sets, held)
            self._holders = {}  # engines that take no part hold an older version from here on
            sent, paused_s = self._update(version, targets, tensors, pause)
            self._transport.leave([one for one in sets if one.number in targets.failed], ())
            self._sets, lost = targets.sets, lost | targets.lost
            self._settle(targets)
            if targets.sets:
                return self._report(targets.engines, sent, begun, paused_s, pause, lost)
            failed_at = failed_at or time.monotonic()
        told = f"no engine has been up for {self._config.rollout.no_engine_timeout_s:.0f} s to publish weights to"
        raise MachineFault("; ".join([told, *dict.fromkeys(lost.values())]))

    def _update(self, version: str, targets: Targets, tensors: Tensors, pause: Pause) -> tuple[Sent, float]:
        """(what was sent, seconds of the pause); what failed is noted in `targets`."""
        crew, transport = self._crew, self._transport
        transport.prepare(version, lambda: self._summed(tensors()))
        try:
            transport.connect(targets)
            if pause == "finish":
                crew.tell(targets, self._until_idle, "get through their requests")
            begun = time.monotonic()
            crew.tell(targets, lambda client: client.pause("retract" if pause == "finish" else pause), "pause")
            if pause != "in_place":
                crew.tell(targets, EngineClient.flush, "drop caches")
            if transport.session:
                crew.tell(targets, EngineClient.begin_update, "begin an update")
            sent = Sent(*crew.sum(*transport.send(targets, lambda: self._summed(tensors()))))
            if transport.session:
                crew.tell(targets, EngineClient.end_update, "end the update")
            if self._config.sync.verify:
                self._verify(targets)
            crew.tell(targets, lambda client: client.set_version(version), "name the weights")
            crew.tell(targets, EngineClient.continue_, "continue")
        except BaseException as error:  # a trainer failed: nobody knows how far the engines came
            targets.failed.update({one.number: f"the trainers failed: {error}" for one in targets.all})
            self._sets = []
            self._settle(targets)
            raise
        return sent, time.monotonic() - begun

    async def _until_idle(self, client: EngineClient) -> None:
        """Wait until nothing runs or waits there: then a flush is accepted."""
        deadline = time.monotonic() + self._config.rollout.request_timeout_s
        while time.monotonic() < deadline:
            try:
                return await client.flush()
            except EngineRefused:
                await asyncio.sleep(IDLE_POLL_S)

    def _verify(self, targets: Targets) -> None:
        if self._config.rollout.engine == "sglang":
            self._digest = verify.against_each_other(self._crew, targets, self._digest)
        else:
            verify.against_sent(self._crew, targets, self._sums)

    def _settle(self, targets: Targets) -> None:
        """Who holds the version now may serve; who failed is restarted."""
        self._holders |= {engine.key: engine for engine in targets.engines}
        for engine, why in targets.lost.items():
            self._condemn(engine, f"its weight update was cut short: {why}")
        if self._fleet is not None:
            self._fleet.mark_synced(self._version, self._holders.values())

    def _condemn(self, engine: EngineRecord, why: str) -> None:
        self._condemned.add(engine.key)
        if self._fleet is not None:
            self._fleet.condemn(engine, why)

    def _report(self, engines: tuple[EngineRecord, ...], sent: Sent, begun: float, paused_s: float, pause: Pause,
                lost: dict[EngineRecord, str]) -> PublishReport:
        return PublishReport(self._version, engines, sent.tensors, sent.bytes, time.monotonic() - begun, paused_s,
                             pause == "in_place", lost)

    def _new_sets(self, old: Sequence[EngineSet], engines: Sequence[EngineRecord]) -> list[EngineSet]:
        sets = assign(old, engines, self._config.sync.engines_per_set, self._next_set)
        self._next_set = max([self._next_set, *(one.number + 1 for one in sets)])
        return sets

    def _wait_for_engines(self, failed_at: float | None) -> Found:
        """On trainer 0: engines that answer, and the weights they hold; waits for one that is starting again.

        None if the first attempt failed too long ago: engines that come up and fail again are no reason to go on.
        """
        deadline = (failed_at or time.monotonic()) + self._config.rollout.no_engine_timeout_s
        if time.monotonic() > deadline:
            return [], {}
        while not (found := self._answering(lambda _: True))[0] and self._fleet and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _newcomers(self) -> Found:
        """On trainer 0: engines that answer and do not hold the present version."""
        return self._answering(lambda engine: engine.key not in self._holders)

    def _answering(self, wanted: Callable[[EngineRecord], bool]) -> Found:
        """Nobody is asked to join a group with an engine that is dead, or hangs: it would wait for its timeout."""
        if self._fleet is None:
            return [], {}
        engines = [engine for engine in self._fleet.engines() if engine.key not in self._condemned and wanted(engine)]
        held = {}
        for engine, answer in zip(engines, self._crew.ask(engines, EngineClient.model_info), strict=True):
            if isinstance(answer, EngineError):
                self._condemn(engine, str(answer))
            else:
                held[engine.key] = answer.weight_version
        return [engine for engine in engines if engine.key in held], held

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return iter_hf_tensors(self._chunks, self._hf)

    def _snapshot(self) -> Tensors:
        """The tensors as they are now, copied to host memory on the source; elsewhere none."""
        for name, tensor in self._gathered():
            if tensor is not None:
                spare = self._spare.get(name)
                if spare is None or spare.shape != tensor.shape:
                    spare = self._spare[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                spare.copy_(tensor)
        return lambda: iter(self._spare.items())

    def _summed(self, tensors: Iterator[tuple[str, torch.Tensor | None]],
                ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The same tensors; their checksums are kept if they are to be verified."""
        verified = self._config.sync.verify and self._config.rollout.engine == "embedded"
        for name, tensor in tensors:
            if verified and tensor is not None and name not in self._sums:
                self._sums[name] = tensor_checksum(tensor)
            yield name, tensor
