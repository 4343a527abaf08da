"""Which nodes of an allocation do what, and which ranks the launcher starts on a node."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.nodes import Division, Node, divide
from megarl.cluster.partition import Partition
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import MachineFault, UserMistake, write_exit
from megarl.launch import _forget_consequences, _lock, torchrun_command

VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "MEGARL_PARTITION", "MEGARL_LIFE",
             "MEGARL_FIRST_RANK", "MEGARL_CONTROL", "SLURM_PROCID", "SLURM_NTASKS")
APART = {"MASTER_ADDR": "node0", "MASTER_PORT": "20100", "MEGARL_LIFE": "7.0.1"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch):
    """`node(trainers, rollouts, VARIABLE=value, ...)` -> this node."""
    def make(trainers: int, rollouts: int, **environ: str) -> Node:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"MASTER_ADDR": "localhost", "NODE_RANK": "1", **environ}.items():
            monkeypatch.setenv(name, value)
        return Node.from_env(ClusterConfig(trainers=trainers, rollouts=rollouts))

    return make


@pytest.mark.parametrize("environ, ranks", [
    ({"NNODES": "2"}, 10), ({"NNODES": "3", "NPROC_PER_NODE": "8,8,4"}, 8),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,4", "NODE_RANK": "2"}, 4), ({"NNODES": "4", "NPROC_PER_NODE": "5"}, 5)])
def test_ranks_of_a_node(node: Callable[..., Node], environ: dict[str, str], ranks: int):
    assert node(16, 4, **environ).processes == ranks


@pytest.mark.parametrize("environ, told", [
    ({"NNODES": "3"}, "3 nodes do not divide the 20 ranks"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8"}, "8,8 is not 20 ranks .* on 3 nodes"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,8"}, "8,8,8 is not 20 ranks"),
    ({"NNODES": "3", "NPROC_PER_NODE": "6"}, "6 is not 20 ranks"),
    ({"NNODES": "3", "NPROC_PER_NODE": "8,8,x"}, "NPROC_PER_NODE: 'x' is not a whole number"),
    ({"MEGARL_PARTITION": "engines"}, "MEGARL_PARTITION: 'engines' is no partition"),
    ({"MEGARL_PARTITION": "trainers", "NODE_RANK": "0"}, "MASTER_PORT: must be set for a partition"),
    ({**APART, "MEGARL_PARTITION": "rollouts", "NNODES": "3"}, r"divide the 4 ranks \(cluster.rollouts\)")])
def test_mistakes(node: Callable[..., Node], environ: dict[str, str], told: str):
    with pytest.raises(UserMistake, match=told):
        node(16, 4, **environ)


@pytest.mark.parametrize("partition, environ, world, ranks", [
    ("trainers", {"NNODES": "2", "NODE_RANK": "1"}, (2, 1), range(8, 16)),
    ("rollouts", {"NNODES": "2", "NODE_RANK": "0"}, (1, 0), range(16, 18)),
    ("rollouts", {"NNODES": "2", "NODE_RANK": "1"}, (1, 0), range(18, 20)),
    ("rollouts", {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "3,1"}, (1, 0), range(19, 20))])
def test_partitions_apart(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, partition: str,
                          environ: dict[str, str], world: tuple[int, int], ranks: range):
    """A node's torchrun world, and the global ranks that its processes find themselves to be."""
    made = node(16, 4, MEGARL_PARTITION=partition, **APART, **environ)
    assert (made.count, made.rank) == world and made.processes == len(ranks) and not made.leads
    assert made.ranks == ranks
    assert made.name == f"{partition}{environ['NODE_RANK']}" and made.control == "node0:20101"
    command = torchrun_command(made, tmp_path, [])
    assert "--rdzv-id=7.0.1" in command
    assert ("--master-addr=node0" in command) == (partition == "trainers")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    begin = made.rank * 8 if partition == "trainers" else 0  # torchrun numbers the ranks of its own world
    monkeypatch.setenv("WORLD_SIZE", str(16 if partition == "trainers" else len(ranks)))
    for local, rank in enumerate(ranks):
        monkeypatch.setenv("RANK", str(begin + local))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        found = Partition.from_env(ClusterConfig(trainers=16, rollouts=4))
        assert (found.rank, found.world, found.local_rank) == (rank, 20, local)
        assert found.is_trainer == (partition == "trainers")
    with pytest.raises(UserMistake, match="start both partitions with the same config"):
        Partition.from_env(ClusterConfig(trainers=8, rollouts=1))


def test_what_ended_ranks_tell_is_forgotten(node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only of ranks of this node: another node's may be why this one was ended."""
    made = node(16, 4, NNODES="3", NPROC_PER_NODE="8,8,4")
    assert made.ranks == range(8, 16)
    for rank, kept in ((3, True), (8, False), (15, False), (16, True)):
        (tmp_path / "exit.json").unlink(missing_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        write_exit(tmp_path, 75, "lost")
        _forget_consequences(tmp_path, made)
        assert (tmp_path / "exit.json").exists() == kept
    rollouts = node(16, 4, MEGARL_PARTITION="rollouts", **APART, NNODES="1", NODE_RANK="0")
    monkeypatch.setenv("MEGARL_FIRST_RANK", "16")
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "exit.json").unlink(missing_ok=True)
    write_exit(tmp_path, 75, "lost")
    _forget_consequences(tmp_path, rollouts)
    assert not (tmp_path / "exit.json").exists()


@pytest.mark.parametrize("number, goes", [(errno.ENOSYS, True), (errno.EOPNOTSUPP, True), (errno.ENOLCK, False)])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, goes: bool,
                                     capsys: pytest.CaptureFixture[str]):
    """Lustre mounted without flock: a run goes on there, and says what nobody looks after. A failing one is told."""
    def flock(file: Any, how: int) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    with contextlib.nullcontext() if goes else pytest.raises(OSError):
        _lock(tmp_path, 0.0).close()
    assert ("has no locks" in capsys.readouterr().out) == goes


def test_a_port_in_use(node: Callable[..., Node]):
    """A mistake of whoever named it; a fault where a batch script picks the next one."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserMistake, match="is in use"):
            node(1, 1, NODE_RANK="0", MASTER_PORT=str(port))
        with pytest.raises(MachineFault, match="is in use"):
            node(1, 1, NODE_RANK="0", MASTER_PORT=str(port), MEGARL_LIFE="1.0.1")
        with pytest.raises(MachineFault, match="is in use"):  # of the control store
            node(1, 1, **APART | {"NODE_RANK": "0", "MEGARL_PARTITION": "trainers", "MASTER_PORT": str(port - 1)})


def config(trainers: int, rollouts: int, **rollout: Any) -> Config:
    return Config.model_validate({
        "cluster": {"trainers": trainers, "rollouts": rollouts}, "model": {"path": "m"},
        "data": {"sources": [{"path": "d"}]}, "reward": {"terms": [{"name": "exact"}]},
        "sglang": {"tp_size": rollout.pop("tp", 1)} if rollout else {},
        "rollout": {"engine": "sglang", **rollout} if rollout else {}})


@pytest.mark.parametrize("made, nodes, gpus, expected", [
    (config(16, 4, engines_per_rank=1, tp=2), 3, 8, ((8, 8), (4,), 0)),  # Qwen3-30B-A3B's recipe
    (config(16, 4, engines_per_rank=1, tp=2), 5, 8, ((8, 8), (4,), 2)),
    (config(128, 8, engines_per_rank=1, tp=8), 24, 8, ((8,) * 16, (1,) * 8, 0)),
    (config(8, 3, engines_per_rank=1, tp=4), 3, 8, ((8,), (2, 1), 0)),
    (config(8, 3, engines_per_rank=1, tp=3), 3, 8, ((8,), (2, 1), 0)),  # two GPUs of a node stay idle
    (config(4, 4, engines_per_rank=1), 1, 8, ((8,), (), 0)),  # both partitions on one node
    (config(12, 2, engines_per_rank=1, tp=2), 2, 8, ((8, 6), (), 0)),
    (config(12, 2, engines_per_rank=1, tp=4), 3, 8, ((8, 5, 1), (), 0)),
    (config(16, 4, engines_per_rank=1, tp=8, gpus_per_rank=4), 4, 8, ((8, 8), (2, 2), 0)),  # engines over two ranks
    (config(2, 1), 3, 0, ((1, 1), (1,), 0)), (config(2, 1), 4, 1, ((1, 1), (1,), 1)),  # without GPUs
    (config(2, 1), 1, 0, ((3,), (), 0)), (config(2, 2), 2, 0, ((2,), (2,), 0)),
    (config(16, 0), 3, 8, ((8, 8), (), 1))])
def test_division(made: Config, nodes: int, gpus: int, expected: tuple):
    found = divide(made, nodes, gpus)
    assert (found.trainers, found.rollouts, found.spares) == expected
    assert sum(found.trainers + found.rollouts) == made.cluster.trainers + made.cluster.rollouts


def test_division_is_told_to_the_script():
    assert Division((8, 8), (4,), 1).lines() == [
        "ranks of trainer nodes: 8,8", "ranks of rollout nodes: 4", "spare nodes: 1"]


@pytest.mark.parametrize("made, nodes, gpus, told", [
    (config(16, 4, engines_per_rank=1, tp=2), 2, 8, r"need 3 nodes of 8; there are 2\n  remedy: sbatch --nodes=3"),
    (config(16, 4, engines_per_rank=3, tp=4), 9, 8, "engines have 12 GPUs, a node has 8")])
def test_too_few(made: Config, nodes: int, gpus: int, told: str):
    with pytest.raises(UserMistake, match=told):
        divide(made, nodes, gpus)
