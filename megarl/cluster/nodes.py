"""Which nodes do what: an allocation cut into trainers, rollout ranks and spares, and one node's part of the world.

The two partitions are either one world (a node may have ranks of both) or two that are started apart: trainers as one
torchrun world over their nodes, rollout ranks as one world on each of theirs, so that the death of a rollout node ends
nothing but itself. Worlds that are started apart find each other at the control store, beside the trainers' meeting
place, under the name of this life of the job; a straggler of an earlier life meets nobody there.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, get_args

from megarl.config import engines
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import MachineFault, UserMistake

PartitionName = Literal["all", "trainers", "rollouts"]
# What the launcher and its ranks find in the environment (Node.from_env, Partition.from_env, store.connect).
PARTITION, LIFE, FIRST_RANK, CONTROL = "MEGARL_PARTITION", "MEGARL_LIFE", "MEGARL_FIRST_RANK", "MEGARL_CONTROL"


@dataclass(frozen=True)
class Division:
    """What the nodes of an allocation are for.

    Attributes:
        trainers: ranks of each trainer node; of every node in use where the partitions share nodes.
        rollouts: ranks of each rollout node; () where the partitions share nodes or nothing is sampled here.
        spares: nodes left over; they take the place of nodes that fail.
    """

    trainers: tuple[int, ...]
    rollouts: tuple[int, ...]
    spares: int

    def lines(self) -> list[str]:
        """For the batch script."""
        return [f"ranks of trainer nodes: {','.join(map(str, self.trainers))}",
                f"ranks of rollout nodes: {','.join(map(str, self.rollouts))}", f"spare nodes: {self.spares}"]


def divide(config: Config, nodes: int, gpus: int = 0) -> Division:
    """Cut `nodes` equal nodes; trainers come first.

    The partitions are apart where trainers fill whole nodes and there are other nodes for the rollout ranks.

    Args:
        config: `cluster` says how many ranks there are, the engines how many GPUs a rollout rank has.
        nodes: of the allocation.
        gpus: of each node; where ranks have no GPUs, the most ranks of a node. 0: all ranks divided by the nodes.
    Raises:
        UserMistake: the ranks need more nodes.
    """
    trainers, rollouts = config.cluster.trainers, config.cluster.rollouts
    each = 1
    if config.rollout.engine == "sglang" and config.cluster.device != "cpu":
        each = config.rollout.engines_per_rank * (engines.gpus(config) // engines.nodes(config))
    gpus = gpus or -(-(trainers + rollouts) // nodes)
    if each > gpus:
        raise UserMistake(f"a rollout rank's engines have {each} GPUs, a node has {gpus}", "rollout.engines_per_rank",
                          "start fewer, or spread an engine over ranks with rollout.gpus_per_rank")
    apart = rollouts and trainers % gpus == 0
    shares = ((_fill(0, trainers, gpus, 1), _fill(0, rollouts, gpus, each)) if apart else
              (_fill(trainers, rollouts, gpus, each), ()))
    need = sum(map(len, shares))
    if need > nodes:
        raise UserMistake(f"{trainers} trainers and {rollouts} rollout ranks of {each} GPUs need {need} nodes of "
                          f"{gpus}; there are {nodes}", "nodes", f"sbatch --nodes={need}, or change cluster")
    return Division(*shares, nodes - need)


def _fill(trainers: int, rollouts: int, gpus: int, each: int) -> tuple[int, ...]:
    """Ranks of each node, if `trainers` ranks of one GPU and then `rollouts` of `each` fill node after node."""
    shares, free = [], 0
    for need in (*repeat(1, trainers), *repeat(each, rollouts)):
        if free < need:
            shares.append(0)
            free = gpus
        shares[-1] += 1
        free -= need
    return tuple(shares)


@dataclass(frozen=True)
class Node:
    """This node's part of the world.

    Attributes:
        name: of its logs.
        count, rank: number of nodes of its torchrun world, and of this one among them.
        processes: ranks started here.
        address, port: where the world's rendezvous listens.
        partition: which ranks the world has.
        first: the global rank of the world's first.
        before: ranks of the world on the nodes before this one.
        control: of partitions that are apart, where the control store listens; else "".
        life: name of this life of the job, "" if nobody gave it one.
    """

    name: str
    count: int
    rank: int
    processes: int
    address: str
    port: int
    partition: PartitionName = "all"
    first: int = 0
    before: int = 0
    control: str = ""
    life: str = ""

    @classmethod
    def from_env(cls, cluster: ClusterConfig) -> Node:
        """Read NNODES, NODE_RANK, NPROC_PER_NODE (a number, or one for each node: 8,8,4), MASTER_ADDR, MASTER_PORT.

        With MEGARL_PARTITION (trainers or rollouts) the first three are about the nodes of that partition, and the
        control store listens one port above MASTER_PORT. MEGARL_LIFE names the life of the job.

        Raises:
            UserMistake: a value is missing, no number, or does not fit the config; or the port is in use.
            MachineFault: a port that a batch script has chosen is in use.
        """
        count, rank = _number("NNODES", 1, low=1), _number("NODE_RANK", 0)
        partition, life = os.environ.get(PARTITION) or "all", os.environ.get(LIFE, "")
        if partition not in get_args(PartitionName):
            raise UserMistake(f"{partition!r} is no partition", PARTITION, "use trainers, rollouts or all")
        if rank >= count:
            raise UserMistake(f"{rank} is not below NNODES ({count})", "NODE_RANK", "number the nodes from 0")
        shares = _shares(cluster, partition, count)
        apart = partition != "all"
        for name in ("MASTER_ADDR", *(["MASTER_PORT"] if apart else [])):
            if (count > 1 or apart) and name not in os.environ:
                raise UserMistake(f"must be set for {'a partition' if apart else f'{count} nodes'}", name,
                                  "give the first trainer node's, on every node")
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number(
            "MASTER_PORT", 29500 if count > 1 else free_port(), low=1)
        if rank == 0 and partition != "rollouts":
            _check_free([port, port + 1] if apart else [port], life)
        control = f"{address}:{port + 1}" if apart else ""
        if partition == "rollouts":
            return cls(f"rollouts{rank}", 1, 0, shares[rank], "127.0.0.1", free_port(), partition,
                       cluster.trainers + sum(shares[:rank]), 0, control, life)
        name = f"trainers{rank}" if apart else f"node{rank}"
        return cls(name, count, rank, shares[rank], address, port, partition, 0, sum(shares[:rank]), control, life)

    @property
    def leads(self) -> bool:
        """Whether global rank 0 is here."""
        return self.rank == self.first == 0

    @property
    def ranks(self) -> range:
        """The global ranks that are started here."""
        begin = self.first + self.before
        return range(begin, begin + self.processes)

    def environment(self) -> dict[str, str]:
        """What its ranks find in the environment, beside what torchrun sets."""
        apart = {PARTITION: self.partition, FIRST_RANK: str(self.first), CONTROL: self.control}
        return (apart if self.control else {}) | ({LIFE: self.life} if self.life else {})


def _shares(cluster: ClusterConfig, partition: str, count: int) -> list[int]:
    """Ranks of each of the partition's nodes."""
    sizes = {"trainers": cluster.trainers, "rollouts": cluster.rollouts}
    names = [partition] if partition in sizes else list(sizes)
    total, keys = sum(sizes[name] for name in names), " + ".join(f"cluster.{name}" for name in names)
    given = os.environ.get("NPROC_PER_NODE", "").split(",")
    if given == [""] and total % count:
        raise UserMistake(f"{count} nodes do not divide the {total} ranks ({keys})", "NNODES",
                          "change one of them, or set NPROC_PER_NODE to a number for each node: 8,8,4")
    if given == [""]:
        return [total // count] * count
    numbers = [_whole("NPROC_PER_NODE", share, low=1) for share in given]
    if len(numbers) == 1:
        numbers *= count
    if (len(numbers), sum(numbers)) != (count, total):
        raise UserMistake(f"{','.join(given)} is not {total} ranks ({keys}) on {count} node{'s' * (count > 1)}",
                          "NPROC_PER_NODE", "give one number for each node" if count > 1 else "leave it unset")
    return numbers


def _number(name: str, default: int, low: int = 0) -> int:
    return _whole(name, os.environ.get(name, str(default)), low)


def _whole(name: str, text: str, low: int) -> int:
    if not text.isdigit() or int(text) < low:
        raise UserMistake(f"{text!r} is not a whole number of at least {low}", name)
    return int(text)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _check_free(ports: list[int], life: str) -> None:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is not in the way
            try:
                probe.bind(("", port))
            except OSError:
                if life:  # the next try has another port
                    raise MachineFault(f"port {port} is in use on this node") from None
                raise UserMistake(f"port {port} is in use on this node", "MASTER_PORT",
                                  "end the process that listens there, or set another port on every node") from None
