"""The fleet of engines as the trainers see it: a registry in the control store.

Supervisors write one record per engine and move one lease counter each. The trainer that publishes weights writes
which engines took them (`mark_synced`): only those may generate. An engine that was restarted since has a new
incarnation, is not on that list, and so gets no request until a publish has reached it.

Keys, all under "fleet/": engine/<id>, load/<id>, lease/<rollout rank>, synced, condemned/<id>, trainers (lease), stop;
of an engine over several ranks also launch/<id> (which incarnation its parts are to start), and joined/<id>/<rank> and
ended/<id>/<rank> (what became of a part).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from torch.distributed import PrefixStore, Store

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.config.engines import nodes
from megarl.config.schema import Config
from megarl.errors import EXIT_MISTAKE, MachineFault, UserMistake
from megarl.rollout.balance import Balancer, Load
from megarl.rollout.lease import Heartbeat, LeaseWatch, read_counter

__all__ = ["Balancer", "EngineRecord", "Fleet", "Registrar"]
TRAINERS_LEASE = "trainers"
URL = "url"  # stands for a rollout rank in the ids and the lease of engines that others started
POLL_S = 0.2
TIMEOUTS_MOST = 3


@dataclass(frozen=True)
class EngineRecord:
    """One engine, written by its supervisor.

    Attributes:
        id: `<rollout rank>.<number>`, the same for the whole run.
        incarnation: counts this engine's processes from 1; weights belong to an incarnation.
        url: `http://host:port`, "" until it is up.
        state: starting, up (answers; whether its weights are current is not said here), down (died, will be started
            again), failed (given up), stopped.
        detail: why it is down or failed.
        status: of a failed one: megarl's exit status for it (64 for a user's mistake).
        relay: address of the relay that takes changed weights for it, "" if it has none.
        load: what it had to do when its supervisor last asked; None if it was not asked yet.
        keys: that its server takes; known to readers of the registry, not to the registry.
    """

    id: str
    incarnation: int = 0
    url: str = ""
    state: Literal["starting", "up", "down", "failed", "stopped"] = "starting"
    detail: str = ""
    status: int = 0
    relay: str = ""
    load: Load | None = field(default=None, compare=False)
    keys: Keys = field(default=NO_KEYS, compare=False, repr=False)

    @property
    def key(self) -> tuple[str, int]:
        """What weights and requests belong to: this process of this engine."""
        return self.id, self.incarnation

    def to_json(self) -> str:
        """As it stands in the registry; the load has a place of its own there, keys have none."""
        return json.dumps({name: value for name, value in asdict(self).items() if name not in ("load", "keys")})

    def describe(self) -> str:
        """`engine 0.1: down (ended with -9)`."""
        return f"engine {self.id}: {self.state}" + (f" ({self.detail})" if self.detail else "")


def engine_ids(rollouts: int, engines_per_rank: int, nodes: int = 1, urls: int = 0) -> list[str]:
    """Ids of every engine of a run, in order: `<first rollout rank>.<number>`; of others' engines `url.<number>`."""
    return [*(f"{rank}.{number}" for rank in range(0, rollouts, nodes) for number in range(engines_per_rank)),
            *(f"{URL}.{number}" for number in range(urls))]


def fleet_store(store: Store) -> PrefixStore:
    """The registry's part of the control store, over a connection of its own (a store serves one call at a time)."""
    return PrefixStore("fleet", store.clone())


def beat_for_trainers(store: Store) -> Heartbeat:
    """The trainers' sign of life, started by trainer 0: supervisors end when it stops."""
    return Heartbeat(fleet_store(store), TRAINERS_LEASE)


def request_stop(store: Store, reason: str) -> None:
    """Ask all supervisors to stop their engines and end (what trainer 0 does at the end of a run)."""
    fleet_store(store).set("stop", reason)


class Fleet:
    """Reads the registry; one per process that talks to engines. Not thread-safe.

    Args:
        store: the control store of this life of the job.
        rollouts, engines_per_rank: sizes, from the config.
        nodes: consecutive rollout ranks over which one engine is spread.
        urls: number of engines that others started.
        lease_timeout_s: an engine whose supervisor's lease stands still for so long counts as gone.
        keys: of the engines' servers; go into the records.
    """

    def __init__(self, store: Store, rollouts: int, engines_per_rank: int, lease_timeout_s: float, *, nodes: int = 1,
                 urls: int = 0, keys: Keys = NO_KEYS) -> None:
        self._store, self._keys, self._nodes = fleet_store(store), keys, nodes
        self._ids = engine_ids(rollouts, engines_per_rank, nodes, urls)
        self._lease_timeout_s = lease_timeout_s
        self._leases = {name: LeaseWatch() for name in [*map(str, range(rollouts)), *([URL] if urls else [])]}
        self._read = _Reader(self._store)
        self._read_at, self._records = float("-inf"), []
        self._timeouts: Counter[tuple[str, int]] = Counter()

    @classmethod
    def from_config(cls, config: Config, store: Store, keys: Keys = NO_KEYS) -> Fleet:
        """The fleet that `cluster`, `rollout` and `sglang` describe."""
        return cls(store, config.cluster.rollouts, config.rollout.engines_per_rank, config.cluster.lease_timeout_s,
                   nodes=nodes(config), urls=len(config.rollout.urls), keys=keys)

    def records(self, max_age_s: float = 0.0) -> list[EngineRecord]:
        """All engines that have a record; read again if the last reading is older than `max_age_s`."""
        if time.monotonic() - self._read_at > max_age_s:
            found = self._read([f"{kind}/{name}" for name in self._ids for kind in ("engine", "load")]
                               + [f"lease/{rank}" for rank in self._leases])
            self._records = [replace(_record(found[f"engine/{name}"], found.get(f"load/{name}")), keys=self._keys)
                             for name in self._ids if f"engine/{name}" in found]
            for rank, lease in self._leases.items():
                lease.observe(int(found.get(f"lease/{rank}", 0)))
            self._read_at = time.monotonic()
        return self._records

    def engines(self, max_age_s: float = 0.0) -> list[EngineRecord]:
        """Engines that are up, under supervisors whose leases move; current weights or not (see `synced_engines`)."""
        return [record for record in self.records(max_age_s) if record.state == "up" and
                not self._silent_rank(record.id)]

    def synced_engines(self, max_age_s: float = 0.0) -> list[EngineRecord]:
        """Those of `engines` that took the last published weights and still are the same process."""
        engines = self.engines(max_age_s)
        text = self._read(["synced"]).get("synced")
        synced = {tuple(key) for key in json.loads(text)["engines"]} if text else set()
        return [record for record in engines if record.key in synced]

    def metrics(self) -> dict[str, float]:
        """For the run's metrics: engines that are up, starts after the first (also of processes that were found behind
        the address of an engine of others), and the sequences that all of them run and have waiting."""
        up = self.engines(max_age_s=1.0)
        loads = [record.load for record in up if record.load is not None]
        return {"fleet/engines": float(len(up)),
                "fleet/restarts": float(sum(max(record.incarnation - 1, 0) for record in self._records)),
                "fleet/running": float(sum(load.running for load in loads)),
                "fleet/waiting": float(sum(load.waiting for load in loads))}

    def mark_synced(self, version: str, engines: Iterable[EngineRecord]) -> None:
        """Say that these engines hold the weights `version`, and no others; called by one trainer after a publish."""
        self._store.set("synced", json.dumps({"version": version, "engines": [record.key for record in engines]}))

    def condemn(self, record: EngineRecord, why: str) -> None:
        """Have the supervisor kill and restart this engine (for instance when its weight update was cut short).

        One that others started cannot be killed: it is left out until it could be brought back to a known state.
        """
        self._store.set(f"condemned/{record.id}", json.dumps([record.incarnation, why]))

    def _silent_rank(self, engine: str) -> str | None:
        """The rollout rank under this engine, or under a part of it, whose lease stands still."""
        first = engine.split(".")[0]
        ranks = [first] if first == URL else map(str, range(int(first), int(first) + self._nodes))
        return next((rank for rank in ranks if self._leases[rank].quiet_s >= self._lease_timeout_s), None)

    def answered(self, record: EngineRecord) -> None:
        """A request came back from this engine."""
        self._timeouts.pop(record.key, None)

    def timed_out(self, record: EngineRecord, why: str) -> None:
        """A request did not come back in time. After `TIMEOUTS_MOST` of them with no answer in between the engine is
        condemned: a server may say that it is healthy while its scheduler hangs."""
        self._timeouts[record.key] += 1
        if self._timeouts[record.key] == TIMEOUTS_MOST:
            self.condemn(record, f"{TIMEOUTS_MOST} requests in a row got no answer, the last one: {why}")

    def wait_ready(self, timeout_s: float, progress: Callable[[int, int], None] | None = None) -> list[EngineRecord]:
        """Wait until every engine of the run is up.

        Args:
            timeout_s: how long.
            progress: called with (up, expected) whenever the number up has changed.
        Raises:
            UserMistake: an engine was given up for a mistake of the user's (no such model, say).
            MachineFault: an engine was given up, or some are not up in time; names them and their state.
        """
        deadline, last = time.monotonic() + timeout_s, -1
        while True:
            engines = self.engines()
            self.raise_failures()
            if len(engines) != last and progress is not None:
                progress(len(engines), len(self._ids))
            last = len(engines)
            if last == len(self._ids):
                return engines
            if time.monotonic() > deadline:
                raise MachineFault(f"{len(self._ids) - last} of {len(self._ids)} engines are not up after "
                                   f"{timeout_s:.0f} s: {self.describe_missing(engines)}")
            time.sleep(POLL_S)

    def raise_failures(self) -> None:
        """Raise what made a supervisor give an engine up, if one did, as the last reading saw it."""
        for record in self._records:
            if record.state == "failed":
                if record.status == EXIT_MISTAKE:
                    raise UserMistake(record.detail)
                raise MachineFault(record.describe())

    def describe_missing(self, present: list[EngineRecord]) -> str:
        """State of every expected engine that is not in `present`, and of its rollout rank if that is silent."""
        known = {record.id: record for record in self._records}
        lines = []
        for name in sorted(set(self._ids) - {record.id for record in present}):
            rank = name.split(".")[0]
            who = "trainer 0, which looks after it," if rank == URL else f"rollout rank {rank}"
            if name not in known:
                lines.append(f"engine {name}: {who} has not reported it")
            elif known[name].state == "up" and (silent := self._silent_rank(name)):
                lines.append(f"engine {name}: {who if rank == URL else f'rollout rank {silent}'} is silent")
            elif known[name].state == "up":
                lines.append(f"engine {name}: up, without this run's weights (restarted since the last publish)")
            else:
                lines.append(known[name].describe())
        return "; ".join(lines)


class _Reader:
    """Reads many keys in one call to the store; a key that nobody has written yet is left out. No key is deleted."""

    def __init__(self, store: Store) -> None:
        self._store, self._there = store, set()

    def __call__(self, keys: Sequence[str]) -> dict[str, bytes]:
        self._there.update(key for key in keys if key not in self._there and self._store.check([key]))
        written = [key for key in keys if key in self._there]
        return dict(zip(written, self._store.multi_get(written), strict=True)) if written else {}


def _record(text: bytes, load: bytes | None) -> EngineRecord:
    record = EngineRecord(**json.loads(text))
    if load:
        incarnation, values = json.loads(load)
        if incarnation == record.incarnation:  # else it is of the process before
            return replace(record, load=Load(*values))
    return record


class Registrar:
    """Writes the registry; one per supervisor. Not thread-safe.

    Args:
        store: the control store.
        rollout_index: this supervisor's number among the rollout ranks; URL for who looks after engines of others.
    """

    def __init__(self, store: Store, rollout_index: int | str) -> None:
        self._store = fleet_store(store)
        self._rank = rollout_index

    def write(self, record: EngineRecord) -> None:
        """Replace the engine's record."""
        self._store.set(f"engine/{record.id}", record.to_json())

    def write_load(self, record: EngineRecord, load: Load) -> None:
        """Replace the engine's load."""
        self._store.set(f"load/{record.id}", json.dumps([record.incarnation, [*vars(load).values()]]))

    def last_incarnation(self, engine: str) -> int:
        """The newest incarnation on record, 0 if there is none (an earlier process of this rank may have left one)."""
        if not self._store.check([f"engine/{engine}"]):
            return 0
        return json.loads(self._store.get(f"engine/{engine}"))["incarnation"]

    def beat(self) -> None:
        """Move this supervisor's lease."""
        self._store.add(f"lease/{self._rank}", 1)

    def peers(self, ranks: Sequence[int]) -> list[int]:
        """The leases of other rollout ranks, 0 for one that has not begun."""
        return [read_counter(self._store, f"lease/{rank}") for rank in ranks]

    def announce(self, engine: str, incarnation: int, meeting: str) -> None:
        """Have the engine's other parts start as this incarnation and meet there; "" has them end."""
        self._store.set(f"launch/{engine}", json.dumps([incarnation, meeting]))

    def launch(self, engine: str) -> tuple[int, str]:
        """(incarnation, meeting) announced last, (0, "") if none."""
        return self._tuple(f"launch/{engine}", (0, ""))

    def join(self, engine: str, incarnation: int) -> None:
        """Note that this rank has started its part of this incarnation."""
        self._store.set(f"joined/{engine}/{self._rank}", json.dumps([incarnation]))

    def joined(self, engine: str) -> int:
        """The incarnation that this rank, or an earlier process of it, started its part of last; 0 if none."""
        return self._tuple(f"joined/{engine}/{self._rank}", (0,))[0]

    def end_part(self, engine: str, incarnation: int, why: str, status: int) -> None:
        """Tell the engine's first rank that this rank's part is gone."""
        self._store.set(f"ended/{engine}/{self._rank}", json.dumps([incarnation, why, status]))

    def ended_part(self, engine: str, rank: int) -> tuple[int, str, int]:
        """(incarnation, why, exit status) of another rank's part that ended last, (0, "", 0) if none did."""
        return self._tuple(f"ended/{engine}/{rank}", (0, "", 0))

    def _tuple(self, key: str, default: tuple) -> tuple:
        return tuple(json.loads(self._store.get(key))) if self._store.check([key]) else default

    def trainers_beat(self) -> int:
        """The trainers' lease, 0 while they have not begun."""
        return read_counter(self._store, TRAINERS_LEASE)

    def stop_reason(self) -> str | None:
        """Why the trainers ask to stop, or None."""
        return self._store.get("stop").decode() if self._store.check(["stop"]) else None

    def condemned(self, engine: str) -> tuple[int, str]:
        """(incarnation, why) that the trainers want killed last, (0, "") if none."""
        return self._tuple(f"condemned/{engine}", (0, ""))


def stopped(record: EngineRecord, state: str, detail: str = "", status: int = 0) -> EngineRecord:
    """The record after its process has ended: no address any more."""
    return replace(record, url="", state=state, detail=detail, status=status)
