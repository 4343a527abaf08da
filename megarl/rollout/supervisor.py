"""The main program of a rollout rank: keeps engines running until the trainers are done or gone.

It holds no model and no device context. Each engine is a child process; a dead one is taken out of the fleet's
registry, started again after a pause, and registered under a new incarnation, which generates nothing until the next
publish of weights has reached it. However this program ends, its engines end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
from torch.distributed import DistError, Store

from megarl.cluster.partition import Partition
from megarl.config import sglang
from megarl.config.schema import Config
from megarl.errors import Ended, MachineFault, MegarlError, UserMistake
from megarl.rollout.balance import Load
from megarl.rollout.client import EngineClient, open_session
from megarl.rollout.fleet import EngineRecord, Registrar, stopped
from megarl.rollout.lease import BEAT_S, LeaseWatch
from megarl.rollout.process import GRACE_S, EngineProcess, engine_command, first_gpu, free_port
from megarl.rollout.protocol import EngineError

log = logging.getLogger(__name__)

WATCH_S = 0.1
RESTART_PAUSE_S = 0.5  # before an engine is started again; doubles with each failed start in a row
RESTART_PAUSE_MOST_S = 30.0
LOAD_S = 0.5  # between readings of an engine's load


def supervise(config: Config, partition: Partition, store: Store, run_dir: Path | str, *,
              address: str = "127.0.0.1") -> None:
    """Run this rank's engines until the trainers request the stop; must be called from the main thread.

    Args:
        config: `rollout` says how many engines of which kind, `cluster` the timeouts.
        partition: this rank's place; `rollout_index` names its engines `<rollout_index>.<number>`.
        store: the control store of this life of the job.
        run_dir: engines log to `run_dir/logs/engine-<id>.log`.
        address: of the interface that engines bind to; loopback where the whole job is on this host.
    Raises:
        UserMistake: SGLang is not where the config says, or is too old; an engine ended with status 64 (its message).
        MachineFault: an engine failed to start `rollout.start_attempts` times in a row; the trainers' lease stands
            still for `cluster.lease_timeout_s` (or never began within `cluster.start_timeout_s`); the control store
            or the parent process is gone; SIGTERM.
        KeyboardInterrupt: SIGINT.
    """
    if config.rollout.engine == "sglang":
        sglang.installation(sglang.python(config))
    supervisor = _Supervisor(config, partition, store, Path(run_dir), address)
    asyncio.run(supervisor.run())
    if supervisor.signal == signal.SIGINT:
        raise KeyboardInterrupt


class _Link(threading.Thread):
    """All talk with the control store, in a thread: a store that hangs must not keep the supervisor from acting.

    Attributes:
        trainers: watch of the trainers' lease.
        trainers_seen: whether it has ever moved.
        stop_reason: why the trainers asked to stop, or None.
        condemned: engine id -> (incarnation, why).
        failure: what ended the talk, or None.
    """

    def __init__(self, registrar: Registrar, engines: list[str]) -> None:
        super().__init__(name="control store", daemon=True)
        self.trainers, self.trainers_seen = LeaseWatch(), False
        self.stop_reason: str | None = None
        self.condemned = dict.fromkeys(engines, (0, ""))
        self.failure: DistError | None = None
        self._registrar, self._outbox = registrar, queue.SimpleQueue()

    def write(self, record: EngineRecord) -> None:
        """Have the record written soon, after those given before."""
        self._outbox.put(partial(self._registrar.write, record))

    def write_load(self, record: EngineRecord, load: Load) -> None:
        """Have the engine's load written soon."""
        self._outbox.put(partial(self._registrar.write_load, record, load))

    def close(self, timeout_s: float) -> None:
        """Write what is left and end; gives up after `timeout_s`."""
        self._outbox.put(None)
        self.join(timeout_s)

    def run(self) -> None:
        """Beat, read, write; until closed or the store fails."""
        try:
            while True:
                self._registrar.beat()
                beats = self._registrar.trainers_beat()
                self.trainers.observe(beats)
                self.trainers_seen |= beats > 0
                self.stop_reason = self._registrar.stop_reason()
                for engine in self.condemned:
                    self.condemned[engine] = self._registrar.condemned(engine)
                if not self._write_outbox(BEAT_S / 4):
                    return
        except DistError as error:
            self.failure = error

    def _write_outbox(self, wait_s: float) -> bool:
        """Write what comes within `wait_s`; False once closed."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                write = self._outbox.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return True
            if write is None:
                return False
            write()


class _Supervisor:
    def __init__(self, config: Config, partition: Partition, store: Store, run_dir: Path, address: str) -> None:
        self._config, self._address, self._logs = config, address, run_dir / "logs"
        self._first_gpu = first_gpu(config, partition)
        self._ids = [f"{partition.rollout_index}.{number}" for number in range(config.rollout.engines_per_rank)]
        registrar = Registrar(store, partition.rollout_index)
        self._first_incarnation = {name: registrar.last_incarnation(name) + 1 for name in self._ids}
        self._link = _Link(registrar, self._ids)
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
                await (engine.stop(GRACE_S[self._config.rollout.engine]) if ending else engine.kill())
            if given_up:
                raise cause
            log.warning("%s; starting it again", cause)
            await asyncio.sleep(min(RESTART_PAUSE_MOST_S, RESTART_PAUSE_S * 2**failures))
            record = EngineRecord(name, record.incarnation + 1)

    async def _live(self, engine: EngineProcess, record: EngineRecord,
                    session: aiohttp.ClientSession) -> tuple[MegarlError, bool]:
        """From its start to its death: (why it died, whether it ever was up)."""
        try:
            await engine.wait_healthy(session, self._config.cluster.start_timeout_s)
        except MegarlError as error:
            return error, False
        self._link.write(replace(record, state="up", url=engine.url))
        log.info("%s is up at %s", engine.name, engine.url)
        return await self._until_death(engine, record, session), True

    async def _start(self, number: int, record: EngineRecord) -> EngineProcess:
        """Start the engine's process on a port that is free now; a clash costs this start, the next takes another."""
        port = free_port(self._address)
        version = f"own-{record.id}-{record.incarnation}-{os.getpid()}"  # no trainer published it: serves nothing
        command = engine_command(self._config, number, self._first_gpu, self._address, port, version)
        return await EngineProcess.start(f"engine {record.id}", command, (self._address, port), version,
                                         self._logs / f"engine-{record.id}.log")

    async def _until_death(self, engine: EngineProcess, record: EngineRecord,
                           session: aiohttp.ClientSession) -> MegarlError:
        """Why the engine is dead: it died, fell silent, or the trainers condemned this incarnation."""
        death = asyncio.create_task(engine.wait_death(session, self._config.cluster.lease_timeout_s))
        loads = asyncio.create_task(self._publish_load(record, EngineClient(engine.url, session)))
        try:
            while not death.done():
                incarnation, why = self._link.condemned[record.id]
                if incarnation == record.incarnation:
                    return MachineFault(f"{engine.name} was condemned: {why}")
                await asyncio.wait({death}, timeout=WATCH_S)
            return death.result()
        finally:
            death.cancel()
            loads.cancel()

    async def _publish_load(self, record: EngineRecord, client: EngineClient) -> None:
        """Tell what the engine has to do, again and again; leaders do without where it cannot be had."""
        reading = 0
        while True:
            try:
                running, waiting = await client.load()
            except EngineError as error:
                log.debug("no load of engine %s: %s", record.id, error)  # whether it lives is wait_death's question
            else:
                reading += 1
                self._link.write_load(record, Load(reading, running, waiting))
            await asyncio.sleep(LOAD_S)
