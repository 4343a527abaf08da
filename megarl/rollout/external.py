"""Engines that others started (`rollout.urls`): trainer 0 looks after them, and registers them as supervisors would.

It can neither start nor end them. What it can do is to know whose weights they hold. When it finds an engine whose
weights are not named as they should be, it brings the engine to a known state (no requests, no open update, not paused)
and names its weights `own-<id>-<incarnation>-<generation>`: a name that no other process has. From then on the name is
that, or one that this life of the job has published. Any other name means another process behind the address, or
somebody else's hand: a new incarnation, which generates nothing until the next publish has reached it. A connection
that comes back to the same name is the same engine with the same weights.

The sign of life is /model_info: /health makes SGLang generate a token unless it was started with
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, which hangs while generation is paused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch.distributed import Store

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.cluster.store import own_address
from megarl.config.engines import gpus, host_of
from megarl.config.schema import Config
from megarl.errors import EXIT_MISTAKE, UserMistake
from megarl.rollout.balance import Load
from megarl.rollout.client import EngineClient, EngineFailed, EngineRefused, EngineTimeout, open_session
from megarl.rollout.fleet import URL, EngineRecord, Registrar, stopped
from megarl.rollout.lease import BEAT_S
from megarl.rollout.link import Link
from megarl.rollout.protocol import EngineError, parse_version

log = logging.getLogger(__name__)

PROBE_S = 0.5
PROBE_TIMEOUT_S = 5.0
PAUSE_S = 1.0  # before an engine whose update was cut short is offered weights again; doubles each time
PAUSE_MOST_S = 30.0


def address_towards(urls: Sequence[str], address: str) -> str:
    """The address under which engines at `urls` reach this host, where `address` is the one for this job's own.

    They differ where the job lives on one host, which has loopback for an address, and an engine does not.
    """
    if not urls or not ipaddress.ip_address(address).is_loopback:
        return address
    routes = [own_address(host_of(url)) for url in urls]
    return next((route for route in routes if not ipaddress.ip_address(route).is_loopback), address)


class ExternalEngines:
    """Keeps the registry's records of `rollout.urls`, from a thread, until closed. A context manager; one per run.

    Args:
        config: the run's.
        store: the control store of this life of the job.
        generation: of this life; what it published is `<generation>:<number>`.
        keys: of the engines' servers.
    """

    def __init__(self, config: Config, store: Store, generation: str, keys: Keys = NO_KEYS) -> None:
        self._config, self._generation, self._keys = config, generation, keys
        self._ids = [f"{URL}.{number}" for number in range(len(config.rollout.urls))]
        self._link = Link(Registrar(store, URL), self._ids)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engines of others", daemon=True)

    def __enter__(self) -> ExternalEngines:
        if self._ids:
            self._link.start()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._ids:
            self._thread.join(2 * PROBE_TIMEOUT_S)

    def _main(self) -> None:
        """If this fails, its lease stands still, and the engines count as gone."""
        try:
            asyncio.run(self._run())
        finally:
            self._link.close(2 * BEAT_S)

    async def _run(self) -> None:
        async with open_session() as session:
            lines = [_Line(name, EngineClient(url, session, control_timeout_s=PROBE_TIMEOUT_S, retries=0,
                                              keys=self._keys), self._config, self._generation, self._link)
                     for name, url in zip(self._ids, self._config.rollout.urls, strict=True)]
            tasks = [asyncio.create_task(line.keep()) for line in lines]
            while not self._closing.is_set() and not any(task.done() for task in tasks):
                await asyncio.sleep(PROBE_S / 5)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


class _Line:
    """One engine of others.

    Attributes:
        record: as it stands in the registry.
    """

    def __init__(self, name: str, client: EngineClient, config: Config, generation: str, link: Link) -> None:
        self.record = EngineRecord(name)
        self._client, self._config, self._generation, self._link = client, config, generation, link
        self._silence_s = config.cluster.lease_timeout_s
        self._claim, self._published = "", -1  # the names that its weights may have: the claim, or from this number on
        self._heard, self._readings = time.monotonic(), 0
        self._cut_short, self._left_out, self._not_before = 0, False, 0.0

    async def keep(self) -> None:
        """Probe for ever."""
        self._write(self.record)
        while True:
            await self._probe()
            await asyncio.sleep(PROBE_S)

    async def _probe(self) -> None:
        try:
            await self._look()
        except UserMistake as mistake:
            self._write(stopped(self.record, "failed", str(mistake), EXIT_MISTAKE))
        except EngineTimeout as error:
            if time.monotonic() - self._heard > self._silence_s:
                self._write(stopped(self.record, "down", f"silent for {self._silence_s:.0f} s: {error}"))
        except EngineError as error:
            self._write(stopped(self.record, "down", str(error)))

    async def _look(self) -> None:
        version = (await self._client.model_info()).weight_version
        self._heard = time.monotonic()
        incarnation, why = self._link.condemned[self.record.id]
        if incarnation == self.record.incarnation > 0:
            if not self._left_out:
                self._leave_out(why)
            if time.monotonic() < self._not_before:
                return
        if self._left_out or not self._is_ours(version):
            if self.record.incarnation and not self._left_out:
                log.warning("engine %s (%s) holds weights '%s': it was started again, or serves others too",
                            self.record.id, self._client.url, version)
            await self._claim_it()
        self._write(replace(self.record, state="up", url=self._client.url, detail="", status=0))
        with suppress(EngineError):  # leaders do without
            running, waiting = await self._client.load()
            self._readings += 1
            self._link.write_load(self.record, Load(self._readings, running, waiting))

    def _is_ours(self, version: str) -> bool:
        """Whether weights of this name are those that this incarnation was last known to hold, or newer ones."""
        found = parse_version(version)
        if found is None or found[0] != self._generation:
            return version == self._claim
        if found[1] < self._published or not self._claim:
            return False
        if found[1] > self._published:
            self._published, self._cut_short = found[1], 0
        return True

    def _leave_out(self, why: str) -> None:
        """For a while: calls that a trainer has given up may still be on their way to it."""
        self._left_out = True
        pause = min(PAUSE_MOST_S, PAUSE_S * 2**self._cut_short)
        self._cut_short += 1
        self._not_before = time.monotonic() + pause
        log.warning("engine %s (%s) was condemned: %s; it is not megarl's to end, so it is left out until it has taken "
                    "a whole set of weights", self.record.id, self._client.url, why)
        self._write(stopped(self.record, "down", f"condemned: {why}"))

    async def _claim_it(self) -> None:
        """Bring the engine to a known state, as a new incarnation.

        Raises:
            UserMistake: it is of another kind or size than the config says, or takes other keys.
        """
        incarnation = self.record.incarnation + 1
        claim = f"own-{self.record.id}-{incarnation}-{self._generation}"
        try:
            await self._check_kind()
            await self._client.abort()
            with suppress(EngineRefused, EngineFailed):  # there is none open, as it should be
                await self._client.end_update()
            await self._client.continue_()
            await self._client.set_version(claim)
        except EngineRefused as error:
            if "status 401" in str(error) or "status 403" in str(error):
                raise UserMistake(f"refuses the key: {error}", self._client.url,
                                  "set MEGARL_API_KEY and MEGARL_ADMIN_KEY to its keys on every rank") from error
            raise
        self._claim, self._published, self._left_out = claim, -1, False
        self.record = EngineRecord(self.record.id, incarnation)

    async def _check_kind(self) -> None:
        kind, size = await self._client.kind()
        expected = self._config.rollout.engine, gpus(self._config)
        if kind != expected[0]:
            raise UserMistake(f"is {kind}, but rollout.engine is {expected[0]}", self._client.url,
                              "set rollout.engine to what serves there")
        if size != expected[1]:
            raise UserMistake(f"has {size} ranks, but sglang.tp_size x pp_size is {expected[1]}", self._client.url,
                              "set sglang.tp_size (and pp_size) as that server has them")

    def _write(self, record: EngineRecord) -> None:
        if record != self.record or record.incarnation == 0:
            self._link.write(record)
        self.record = record
