"""The main program of a rollout rank: keeps engines running until the trainers are done or gone.

It holds no model and no device context. Each engine is a child process; a dead one is taken out of the fleet's
registry, started again after a pause, and registered under a new incarnation, which generates nothing until the next
publish of weights has reached it. However this program ends, its engines end with it.

An SGLang engine that is too large for one rank's GPUs is spread over consecutive ranks, one process on each. The first
of these ranks registers it and says which incarnation the others are to start their parts of. If any part dies, all
end, and the next incarnation is begun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import aiohttp
from torch.distributed import Store

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.cluster.partition import Partition
from megarl.config import sglang
from megarl.config.engines import nodes
from megarl.config.schema import Config
from megarl.errors import EXIT_MISTAKE, Ended, MachineFault, MegarlError, UserMistake
from megarl.rollout.balance import Load
from megarl.rollout.client import EngineClient, open_session
from megarl.rollout.fleet import EngineRecord, Registrar, stopped
from megarl.rollout.lease import BEAT_S
from megarl.rollout.link import Link
from megarl.rollout.process import GRACE_S, EngineProcess, engine_command, first_gpu, free_port, socket_address
from megarl.rollout.protocol import EngineError
from megarl.rollout.relay.command import needs_relay, remove_copy, with_relay
from megarl.rollout.sglang import Part, on_cpu, write_keys

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 0.1
RESTART_PAUSE_S = 0.5  # before an engine is started again; doubles with each failed start in a row
RESTART_PAUSE_MOST_S = 30.0
LOAD_S = 0.5  # between readings of an engine's load


def supervise(config: Config, partition: Partition, store: Store, run_dir: Path | str, *,
              address: str = "127.0.0.1", keys: Keys = NO_KEYS) -> None:
    """Run this rank's engines until the trainers request the stop; must be called from the main thread.

    Args:
        config: `rollout` says how many engines of which kind, `cluster` the timeouts.
        partition: this rank's place; `rollout_index` names its engines `<rollout_index>.<number>`.
        store: the control store of this life of the job.
        run_dir: engines log to `run_dir/logs/engine-<id>.log`.
        address: of the interface that engines bind to; loopback where the whole job is on this host.
        keys: that engines take.
    Raises:
        UserMistake: SGLang is not where the config says, is too old, or has another NCCL; an engine ended with status
            64 (its message).
        MachineFault: an engine failed to start `rollout.start_attempts` times in a row; the trainers' lease stands
            still for `cluster.lease_timeout_s` (or never began within `cluster.start_timeout_s`); the control store
            or the parent process is gone; SIGTERM.
        KeyboardInterrupt: SIGINT.
    """
    if config.rollout.engine == "sglang":
        sglang.installation(sglang.python(config), tuple(config.rollout.sglang_prefix))
        if not on_cpu(config):
            sglang.check_nccl(config)
    supervisor = _Supervisor(config, partition, store, Path(run_dir), address, keys)
    asyncio.run(supervisor.run())
    if supervisor.signal == signal.SIGINT:
        raise KeyboardInterrupt


class _Supervisor:
    def __init__(self, config: Config, partition: Partition, store: Store, run_dir: Path, address: str,
                 keys: Keys) -> None:
        self._config, self._address, self._logs, self._keys = config, address, run_dir / "logs", keys
        self._interpreter = sglang.python(config) if config.rollout.engine == "sglang" else sys.executable
        self._first_gpu, self._nodes = first_gpu(config, partition), nodes(config)
        index = partition.rollout_index
        self._node, first = index % self._nodes, index - index % self._nodes
        self._part_of = f"{first}.0" if self._node else ""
        self._ids = [] if self._node else [f"{index}.{number}" for number in range(config.rollout.engines_per_rank)]
        registrar = Registrar(store, index)
        self._first_incarnation = {name: registrar.last_incarnation(name) + 1 for name in self._ids}
        self._joined = registrar.joined(self._part_of) if self._node else 0
        self._link = Link(registrar, self._ids, range(index + 1, first + self._nodes) if self._ids else (),
                          self._part_of)
        self._relays: dict[str, str] = {}
        self._parent = os.getppid()
        self.signal: signal.Signals | None = None

    async def run(self) -> None:
        """Keep the engines until there is a reason to end; engines are dead when this returns or raises."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._link.start()
        async with open_session() as session:
            tasks = [asyncio.create_task(self._watch_trainers())]
            tasks += [asyncio.create_task(self._keep(number, name, session)) for number, name in enumerate(self._ids)]
            if self._part_of:
                tasks.append(asyncio.create_task(self._keep_part()))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._link.close(timeout_s=2 * BEAT_S)
        for task in done:
            task.result()

    def _on_signal(self, number: signal.Signals) -> None:
        self.signal = number

    async def _watch_trainers(self) -> None:
        """Return when the trainers or SIGINT ask to stop; raise when they, the store or the parent are gone."""
        cluster = self._config.cluster
        while True:
            if self._link.stop_reason is not None:
                log.info("stopping engines: %s", self._link.stop_reason)
                return
            if self.signal == signal.SIGINT:
                return
            if self.signal is not None:
                raise Ended(f"rollout rank ended by {self.signal.name}")
            if os.getppid() != self._parent:
                raise MachineFault("the launcher of this rollout rank is gone")
            if self._link.failure is not None:
                raise MachineFault(f"the control store is gone: {str(self._link.failure).splitlines()[0]}")
            limit = cluster.lease_timeout_s if self._link.trainers_seen else cluster.start_timeout_s
            if self._link.trainers.quiet_s > limit:
                raise MachineFault(f"no sign of life from trainer 0 for {limit:.0f} s")
            await asyncio.sleep(WATCH_S)

    async def _keep(self, number: int, name: str, session: aiohttp.ClientSession) -> None:
        """Run one engine, again and again; ends only by raising (or by being cancelled)."""
        record, failures = EngineRecord(name, self._first_incarnation[name]), 0
        while True:
            while self._silent_peers():
                await asyncio.sleep(WATCH_S)
            self._link.write(record)
            engine = await self._start(number, record)
            ending = False
            try:
                cause, was_up = await self._live(engine, record, session)
                failures = 0 if was_up else failures + 1
                given_up = isinstance(cause, UserMistake) or failures >= self._config.rollout.start_attempts
                self._link.write(stopped(record, "failed" if given_up else "down", str(cause), cause.status))
            except asyncio.CancelledError:
                ending = True
                self._link.write(stopped(record, "stopped"))
                raise
            finally:  # one that is to be replaced has nothing to finish
                if self._nodes > 1:
                    self._link.announce(name, record.incarnation, "")
                await (engine.stop(GRACE_S[self._config.rollout.engine]) if ending else engine.kill())
                remove_copy(self._config, name)
                self._keys_file(name).unlink(missing_ok=True)
            if given_up:
                raise cause
            log.warning("%s; starting it again", cause)
            await asyncio.sleep(min(RESTART_PAUSE_MOST_S, RESTART_PAUSE_S * 2**failures))
            record = EngineRecord(name, record.incarnation + 1)

    async def _live(self, engine: EngineProcess, record: EngineRecord,
                    session: aiohttp.ClientSession) -> tuple[MegarlError, bool]:
        """From its start to its death: (why it died, whether it ever was up)."""
        try:
            await self._unless_ended(record, engine.wait_healthy(session, self._config.cluster.start_timeout_s))
        except MegarlError as error:
            return error, False
        self._keys_file(record.id).unlink(missing_ok=True)
        self._link.write(replace(record, state="up", url=engine.url, relay=self._relays.get(record.id, "")))
        log.info("%s is up at %s", engine.name, engine.url)
        client = EngineClient(engine.url, session, control_timeout_s=5.0, keys=self._keys)
        loads = asyncio.create_task(self._publish_load(record, client))
        try:
            return await self._unless_ended(
                record, engine.wait_death(session, self._config.cluster.lease_timeout_s)), True
        except MegarlError as error:
            return error, True
        finally:
            loads.cancel()

    async def _start(self, number: int, record: EngineRecord) -> EngineProcess:
        """Start the engine's process on ports that are free now; a clash costs this start, the next takes others."""
        part = None
        if self._nodes > 1:
            part = Part(0, self._nodes, socket_address(self._address, free_port(self._address)))
            self._link.announce(record.id, record.incarnation, part.meeting)
        return await self._start_process(f"engine {record.id}", number, record, part)

    async def _start_process(self, title: str, number: int, record: EngineRecord, part: Part | None) -> EngineProcess:
        port, node = free_port(self._address), part.node if part else 0
        version = f"own-{record.id}-{record.incarnation}-{os.getpid()}"  # no trainer published it: serves nothing
        keys_file = None
        if self._config.rollout.engine == "sglang" and self._keys and not node:
            keys_file = self._keys_file(record.id)
            write_keys(keys_file, self._keys)
        command = engine_command(self._config, number, self._first_gpu, self._address, port, version, part, keys_file)
        if needs_relay(self._config):
            command, self._relays[record.id] = with_relay(self._config, command, record.id, self._address)
        path = self._logs / f"engine-{record.id}{f'.node{node}' if node else ''}.log"
        return await EngineProcess.start(title, command, (self._address, port), version, path,
                                         interpreter=self._interpreter, keys=self._keys)

    def _keys_file(self, name: str) -> Path:
        """There from the start of the engine until it is up."""
        return self._logs.absolute() / f"engine-{name}.keys.yaml"

    async def _unless_ended(self, record: EngineRecord, work: Awaitable[T]) -> T:
        """The work's result; raises instead once the trainers condemned this incarnation, or a part of it is gone."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                incarnation, why = self._link.condemned[record.id]
                if incarnation == record.incarnation:
                    raise MachineFault(f"engine {record.id} was condemned: {why}")
                self._raise_lost_part(record)
                await asyncio.wait({task}, timeout=WATCH_S)
            return task.result()
        finally:
            task.cancel()

    def _raise_lost_part(self, record: EngineRecord) -> None:
        for incarnation, why, status in self._link.ended.values():
            if incarnation == record.incarnation:
                raise UserMistake(why) if status == EXIT_MISTAKE else MachineFault(why)
        if silent := self._silent_peers():
            raise MachineFault(f"engine {record.id}: rollout rank {silent[0]}, which has a part of it, is silent")

    def _silent_peers(self) -> list[int]:
        return [rank for rank, lease in list(self._link.peers.items())
                if lease.quiet_s > self._config.cluster.lease_timeout_s]

    async def _publish_load(self, record: EngineRecord, client: EngineClient) -> None:
        """Tell what the engine has to do, again and again; leaders do without where it cannot be had."""
        reading = 0
        while True:
            with suppress(EngineError):  # whether it lives is wait_death's question
                running, waiting = await client.load()
                reading += 1
                self._link.write_load(record, Load(reading, running, waiting))
            await asyncio.sleep(LOAD_S)

    async def _keep_part(self) -> None:
        """Run this rank's part of an engine whenever its first rank announces an incarnation; ends by cancelling."""
        name, seen = f"engine {self._part_of}, part {self._node}", self._joined
        if seen:  # an earlier process of this rank had it, and it died with that
            self._link.end_part(seen, f"{name}: its rollout rank was started again", 0)
        while True:
            incarnation, meeting = self._link.launch
            if incarnation <= seen or not meeting:
                await asyncio.sleep(WATCH_S)
                continue
            seen = incarnation
            self._link.note_join(seen)
            engine = await self._start_process(name, 0, EngineRecord(self._part_of, seen),
                                               Part(self._node, self._nodes, meeting))
            end, ending = asyncio.create_task(engine.wait_end()), False
            try:
                while not end.done() and self._link.launch == (seen, meeting):
                    await asyncio.wait({end}, timeout=WATCH_S)
            except asyncio.CancelledError:
                ending = True
                raise
            finally:
                end.cancel()
                await (engine.stop(GRACE_S["sglang"]) if ending else engine.kill())
            if not end.cancelled():
                cause = end.result()
                log.warning("%s", cause)
                self._link.end_part(seen, str(cause), cause.status)
