"""What the measurements of nodes mean: which of them are bad, and why."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations

import pytest

from megarl.cluster.preflight import (
    Floors,
    Report,
    blame,
    judge,
    report_from,
    rounds,
    smi_problems,
    table,
    xid_problems,
)

GOOD = Report(versions={"torch": "2.13.0", "nccl": "2.29.7"}, gemm=[700.0, 710.0], device_free=[0.99, 0.99],
              memory_gb=900.0, disk_mbps=800.0, problems=[])


@pytest.mark.parametrize("nodes", range(13))
def test_each_node_has_two_partners(nodes: int):
    """The pairs are a ring's edges, and within a round no node is in two."""
    found = rounds(nodes)
    for pairs in found:
        flat = [node for pair in pairs for node in pair]
        assert len(set(flat)) == len(flat) and all(first < second for first, second in pairs)
    edges = [pair for pairs in found for pair in pairs]
    ring = {tuple(sorted((node, (node + 1) % nodes))) for node in range(nodes)} if nodes > 1 else set()
    assert len(edges) == len(ring) and set(edges) == ring


@pytest.mark.parametrize("change, told", [
    ({"gemm": [700.0, 500.0]}, ["device 1 multiplies at 500 TFLOP/s, the median is 700"]),
    ({"gemm": [700.0]}, ["1 devices, others have 2"]),
    ({"device_free": [0.99, 0.4]}, ["device 1 has 40% of its memory free"]),
    ({"disk_mbps": 3.0}, ["writes 3 MB/s to the run directory"]),
    ({"memory_gb": 0.5}, ["0.5 GB of memory free"]),
    ({"skew_s": -3.0}, ["its clock is -3.0 s off the other nodes'"]),
    ({"sees_folder": False}, ["does not see the other nodes' files in the run directory"]),
    ({"versions": {"torch": "2.12.0", "nccl": "2.29.7"}}, ["torch 2.12.0, others have 2.13.0"]),
    ({"versions": {"torch": "2.13.0"}}, ["nccl none, others have 2.29.7"]),
    ({"versions": {**GOOD.versions, "apex": "0.1"}}, ["apex 0.1, others have none"]),
    ({"problems": ["GPU 3: Xid 79"]}, ["GPU 3: Xid 79"])])
def test_one_bad_node_among_four(change: dict, told: list[str]):
    reports = {"a": GOOD, "b": dataclasses.replace(GOOD, **change), "c": GOOD, "d": GOOD}
    assert judge(reports, Floors()) == {"a": [], "b": told, "c": [], "d": []}


@pytest.mark.parametrize("change, told", [
    ({"skew_s": 3.0}, "its clock is -3.0 s off the other nodes'"),
    ({"sees_folder": False}, "does not see the other nodes' files in the run directory")])
def test_the_first_node_is_the_bad_one(change: dict, told: str):
    """All others differ from it: by its clock, or as its run directory is another one."""
    reports = {"a": GOOD, **{name: dataclasses.replace(GOOD, **change) for name in "bcd"}}
    assert judge(reports, Floors()) == {"a": [told], "b": [], "c": [], "d": []}
    lost = {name: dataclasses.replace(GOOD, sees_folder=False, problems=["cannot write"] * (name == "a"))
            for name in "abcd"}
    assert judge(lost, Floors()) == {"a": ["cannot write"], "b": [], "c": [], "d": []}


def test_a_node_without_a_report():
    found = judge({"a": GOOD, "b": None}, Floors())
    assert found == {"a": [], "b": ["no report in time"]}
    shown = table({"a": GOOD, "b": None}, found).splitlines()
    assert shown[1].split() == ["a", "2", "700", "800", "900.0", "+0.000", "good"]
    assert shown[2].split() == ["b", "-", "-", "-", "-", "-", "bad"] and shown[3] == "    no report in time"


def test_a_report_survives_the_way():
    assert report_from(json.loads(json.dumps(dataclasses.asdict(GOOD)))) == GOOD


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_blame_finds_any_slow_nodes(nodes: int):
    """One node, or two without a common partner, slow or dead: found, and nobody else."""
    names = "abcdefgh"[:nodes]
    pairs = [(names[first], names[second]) for each in rounds(nodes) for first, second in each]
    partners = {name: {other for pair in pairs if name in pair for other in pair} for name in names}
    for guilty in [{name} for name in names] + [set(two) for two in combinations(names, 2)
                                                if nodes == 8 and not partners[two[0]] & partners[two[1]]]:
        for speed in (4.0, None):
            speeds = {pair: speed if guilty & set(pair) else 20.0 for pair in pairs}
            found, notes = blame(speeds, Floors())
            assert set(found) == guilty and not notes


def test_a_slow_link_is_told_and_nobody_left_out():
    found, notes = blame({("a", "b"): 20.0, ("b", "c"): 2.0, ("c", "d"): 20.0, ("a", "d"): 20.0}, Floors())
    assert found == {} and notes == ["all-reduce with c at 2 GB/s, good is 20"]


def test_a_single_pair_that_fails():
    found, _ = blame({("a", "b"): None}, Floors())
    assert set(found) == {"a", "b"}  # who of them cannot be said


def test_nvidia_smi():
    text = ("0, 0, No, No, Not Active\n1, 3, [N/A], [N/A], Not Active\n2, 0, Yes, No, Active\n"
            "3, 0, 0, 0, [Not Supported]\n4, 0, 0, 1, Not Active\n")
    assert smi_problems(text) == [
        "GPU 1: ecc.errors.uncorrected.volatile.total is 3", "GPU 2: remapped_rows.pending is Yes",
        "GPU 2: clocks_event_reasons.hw_slowdown is Active", "GPU 4: remapped_rows.failure is 1"]
    assert smi_problems("") == []


def test_xids():
    """Of the last day, of the hardware, once each."""
    log = ("[   10.5] NVRM: Xid (PCI:0000:1a:00): 79, pid=1, GPU has fallen off the bus.\n"
           "[90000.1] NVRM: Xid (PCI:0000:1a:00): 13, Graphics SM Warp Exception\n"
           "[90000.2] NVRM: Xid (PCI:0000:3d:00): 74, NVLink: fatal error\n"
           "[90000.3] NVRM: Xid (PCI:0000:3d:00): 74, NVLink: fatal error\n")
    assert xid_problems(log, 90100.0) == ["GPU 0000:3d:00: Xid 74 (NVLink error)"]
