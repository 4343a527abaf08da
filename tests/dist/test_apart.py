"""Partitions started apart find each other at the control store, by the name of a life; nodes examine each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forks

from megarl.cluster.nodes import CONTROL, FIRST_RANK, LIFE, free_port
from megarl.cluster.preflight import Floors
from megarl.config.schema import ClusterConfig


def _meet(folder: str, environ: dict[str, str], start_timeout_s: float) -> None:
    """In a process of its own: connect as a rank of 2 trainers and 2 rollout ranks; leave what came of it in a file."""
    from megarl.cluster.partition import Partition
    from megarl.cluster.store import connect, farewell
    from megarl.errors import MachineFault

    os.environ.update(environ)
    cluster = ClusterConfig(trainers=2, rollouts=2, start_timeout_s=start_timeout_s)
    partition = Partition.from_env(cluster)
    try:
        control = connect(partition, cluster)
        count = control.store.add("here", 1)
        outcome: Any = [control.generation, control.address, control.keys.to_text(), count]
        farewell(control, partition, 20.0)
    except MachineFault as error:
        outcome = str(error)
    (Path(folder) / f"{environ[LIFE]}-{partition.rank}").write_text(json.dumps(outcome))


def run(function: Any, *calls: tuple) -> None:
    processes = [forks.context().Process(target=function, args=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode == 0


def test_partitions_meet_under_the_name_of_a_life(tmp_path: Path) -> None:
    """Two trainers in one world, two rollout ranks in worlds of their own, and one that an earlier life has left."""
    control = f"127.0.0.1:{free_port()}"

    def rank(life: str, first: int, number: int, world: int, timeout_s: float = 30.0) -> tuple:
        return str(tmp_path), {CONTROL: control, LIFE: life, FIRST_RANK: str(first), "RANK": str(number),
                               "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}, timeout_s

    run(_meet, rank("5.0.2", 0, 0, 2), rank("5.0.2", 0, 1, 2), rank("5.0.2", 2, 0, 1), rank("5.0.2", 3, 0, 1),
        rank("5.0.1", 2, 0, 1, 3.0))
    found = [json.loads((tmp_path / f"5.0.2-{number}").read_text()) for number in range(4)]
    assert found[0][0].startswith("5.0.2.") and all(other[:3] == found[0][:3] for other in found)
    assert sorted(other[3] for other in found) == [1, 2, 3, 4]  # one store
    assert json.loads((tmp_path / "5.0.1-2").read_text()).startswith("rank 2 could not meet the others within 3 s")


def _examine(folder: str, name: str, rank: int, port: int) -> None:
    """In a process of its own: this "node" among four, of which the last does not come; b is not as it should be."""
    from megarl.cluster import probe

    os.environ["MEGARL_NODES"] = "a b c d"
    if name == "b":
        clock, versions = probe.time.time, probe._versions
        probe.time.time = lambda: clock() + 60.0
        probe._versions = lambda: versions() | {"torch": "1.0"}
    verdict = probe.examine(probe.Place(name, 4, rank, "127.0.0.1", port), Path(folder),
                            Floors(gemm_ratio=0.0, pair_ratio=0.0, disk_mbps=0.0), 8.0)
    assert (verdict is None) == (rank > 0)
    if verdict is not None:
        (Path(folder) / "verdict").write_text(json.dumps([verdict.found, verdict.allreduce_gbps]))


def test_nodes_examine_each_other(tmp_path: Path) -> None:
    """One is bad, one does not come: both are named, and the others have an all-reduce."""
    port = free_port()
    run(_examine, *((str(tmp_path), name, rank, port) for rank, name in enumerate("abc")))
    found, speed = json.loads((tmp_path / "verdict").read_text())
    assert found["a"] == found["c"] == [] and found["d"] == ["no report in time"] and speed > 0
    clock, version = found["b"]
    assert clock.startswith("its clock is +60") and version.startswith("torch 1.0, others have ")
    assert [path.name for path in tmp_path.iterdir() if "preflight" in path.name] == []
