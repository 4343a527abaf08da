"""The control store: one key-value store for the run (membership, addresses, counters, stop requests).

Only small values and counters go through it, never samples or weights. Every key lies under the generation of this
life of the job, so that a straggler of an earlier life cannot meddle.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megarl.cluster.keys import NO_KEYS, Keys
from megarl.cluster.nodes import CONTROL, LIFE
from megarl.cluster.partition import Partition
from megarl.config.schema import ClusterConfig
from megarl.errors import MachineFault, UserMistake


@dataclass(frozen=True)
class Control:
    """What `connect` gives: the stores and the name of this life.

    Attributes:
        store: control store, keys already under the generation.
        generation: unique name of this life of the job: its name, for logs, and a token; no colon in it.
        address: the address under which other hosts reach this one.
        keys: of the engines' servers, the same on all ranks.
    """

    store: dist.Store
    generation: str
    address: str
    keys: Keys = NO_KEYS
    _anchor: tuple[object, ...] = ()  # keeps the server and the rendezvous alive


def connect(partition: Partition, cluster: ClusterConfig) -> Control:
    """Meet the other ranks and agree on the control store and the generation.

    The first meeting is at MASTER_ADDR:MASTER_PORT, where torchrun's agent serves (or rank 0, where there is none).
    Partitions that are started apart meet at the control store itself. It is hosted by trainer 0 (`cluster.store:
    auto`), or is one that outlives the job (`host:port`).

    Raises:
        UserMistake: cluster.store is neither auto nor host:port; a key in the environment cannot be one.
        MachineFault: the ranks did not meet within cluster.start_timeout_s.
    """
    timeout = datetime.timedelta(seconds=cluster.start_timeout_s)
    place = os.environ.get(CONTROL, "") if cluster.store == "auto" else cluster.store
    try:
        if CONTROL in os.environ:
            host, port = _split(place)
            address = own_address(host)
            client = dist.TCPStore(host, port, is_master=partition.rank == 0 and cluster.store == "auto",
                                   wait_for_workers=False, timeout=timeout)
            meeting = dist.PrefixStore(f"meeting/{life(os.environ)}", client)  # an earlier life's ranks never meet here
        else:
            meeting, _, _ = next(dist.rendezvous("env://", partition.rank, partition.world, timeout=timeout))
            one_host = int(os.environ.get("LOCAL_WORLD_SIZE", partition.world)) == partition.world
            address = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), one_host)
            client = _control_store(meeting, partition.rank, address, place, timeout)
        if partition.rank == 0:
            meeting.set("megarl/keys", (Keys.from_env(os.environ) or Keys.generate()).to_text())
            meeting.set("megarl/generation", f"{life(os.environ)}.{secrets.token_hex(3)}")
        generation = meeting.get("megarl/generation").decode()
        keys = Keys.from_text(meeting.get("megarl/keys").decode())
    except dist.DistError as error:
        raise MachineFault(f"rank {partition.rank} could not meet the others within {cluster.start_timeout_s:.0f} s: "
                           f"{str(error).splitlines()[0]}") from error
    return Control(dist.PrefixStore(generation, client), generation, address, keys, (meeting, client))


def _control_store(meeting: dist.Store, rank: int, address: str, place: str, timeout: datetime.timedelta
                   ) -> dist.TCPStore:
    """Where the first meeting was elsewhere: the store at `place`, or one on rank 0's host, which tells the others."""
    if rank:
        place = meeting.get("megarl/control").decode()
    elif not place:
        server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        meeting.set("megarl/control", f"{address}:{server.port}")
        return server
    else:
        meeting.set("megarl/control", place)
    return dist.TCPStore(*_split(place), is_master=False, wait_for_workers=False, timeout=timeout)


class Meeting:
    """Where the trainers wait for each other without a time limit; called by all of them, the same number of times.

    A collective's timeout (`cluster.timeout_s`) says that a peer is lost. What only some ranks do and what may rightly
    take longer (sampling, evaluating, starting engines) must not keep the others waiting in a collective: they wait
    here first. If one dies meanwhile, the launcher ends the job.

    Args:
        store: the control store.
        trainers: how many come.
    """

    def __init__(self, store: dist.Store, trainers: int) -> None:
        self._store, self._trainers, self._turn = dist.PrefixStore("meeting", store), trainers, 0

    def __call__(self) -> None:
        """Return when all have come.

        Raises:
            torch.distributed.DistError: the control store is gone.
        """
        self.arrive()
        begun = time.monotonic()
        while not self.complete():
            time.sleep(min(max((time.monotonic() - begun) / 50, 0.002), 0.25))

    def arrive(self) -> None:
        """Come, and do not wait."""
        self._turn += 1
        self._store.add(str(self._turn), 1)

    def complete(self) -> bool:
        """Whether all have come to the meeting at which this trainer arrived last."""
        return self._store.add(str(self._turn), 0) == self._trainers


def own_address(towards: str, one_host: bool = True) -> str:
    """The address of the interface by which this host reaches `towards` (loopback where that is this host).

    With `one_host` false never loopback: a host's own name often stands for 127.0.1.1, where nobody else finds it.
    The interface of the default route is taken then.
    """
    try:
        found = _interface(towards)
        return found if one_host or not ipaddress.ip_address(found).is_loopback else _interface("192.0.2.1")  # no host
    except OSError:
        return "127.0.0.1"


def _interface(towards: str) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here, it only picks the route
        return probe.getsockname()[0]


def _split(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise UserMistake(f"'{place}' is not an address", "cluster.store", "use auto or host:port")
    return host, int(port)


def life(environ: Mapping[str, str]) -> str:
    """The name of this life of the job, `<job>.<restart>` or what the batch script calls it; the same on all ranks."""
    restart = environ.get("SLURM_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return environ.get(LIFE) or f"{environ.get('SLURM_JOB_ID', 'local')}.{restart}"


def farewell(control: Control, partition: Partition, timeout_s: float) -> None:
    """Leave the run in order: trainer 0, which may host the store, leaves last.

    Args:
        control, partition: this rank's.
        timeout_s: how long trainer 0 waits for the others; after it, it leaves all the same.
    """
    try:
        left = control.store.add("left", 1)
    except dist.DistError:
        if partition.is_trainer:
            raise
        return  # this rank was asked to stop, and took longer to than the trainers waited
    deadline = time.monotonic() + timeout_s
    while partition.rank == 0 and left < partition.world and time.monotonic() < deadline:
        time.sleep(0.05)
        left = control.store.add("left", 0)
