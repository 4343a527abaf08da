"""Is this set of nodes fit to train? What the measurements of each node mean; `probe` takes them.

Where hardware is what it should be, nodes equal each other: what can be compared is judged against the median of all,
so that no table of hardware is needed. Floors in absolute numbers can be given on top.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median, median_low

# Errors of the hardware, link or driver; others (13, 31, 43, 45 ...) are mostly a program's own.
# https://docs.nvidia.com/deploy/xid-errors
XIDS = {48: "double-bit memory error", 63: "row remapping", 64: "row remapping failed", 74: "NVLink error",
        79: "the GPU has fallen off the bus", 92: "many single-bit memory errors", 94: "contained memory error",
        95: "uncontained memory error", 119: "the GPU's system processor does not answer",
        120: "error of the GPU's system processor", 140: "uncorrected memory error"}
XID_AGE_S = 24 * 3600.0
# Asked of nvidia-smi for each GPU, with the value that is right; "[N/A]" is right too.
SMI_FIELDS = {"ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.pending": "0", "remapped_rows.failure": "0",
              "clocks_event_reasons.hw_slowdown": "Not Active"}
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([^)]*)\): (\d+)")
_OK_VALUES = ("[N/A]", "N/A", "", "[Not Supported]", "No")


@dataclass(frozen=True)
class Floors:
    """What a node must reach.

    Attributes:
        gemm_ratio: of the median device's matrix products per second.
        pair_ratio: of a good pair's all-reduce bandwidth.
        allreduce_gbps: bandwidth of the all-reduce over all nodes, GB/s on each rank's links; 0: whatever it is.
        disk_mbps: of writing to the run directory, MB/s.
        memory_gb: free memory of the host.
        device_free: free part of each device's memory: another process may have the rest.
        skew_s: from the usual clock: the median; of two nodes, the first one's.
    """

    gemm_ratio: float = 0.8
    pair_ratio: float = 0.5
    allreduce_gbps: float = 0.0
    disk_mbps: float = 20.0
    memory_gb: float = 1.0
    device_free: float = 0.9
    skew_s: float = 2.0


@dataclass(frozen=True)
class Report:
    """What one node says of itself.

    Attributes:
        versions: of programs and libraries, by name.
        gemm: TFLOP/s of each device.
        device_free: free part of each device's memory; [] without GPUs.
        memory_gb: free memory of the host.
        disk_mbps: of writing and syncing a file in the run directory.
        skew_s: its clock minus the first node's; measured last.
        sees_folder: whether a file that the first node wrote into the run directory is there.
        problems: told by the driver and the kernel, or failures of the checks themselves.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    gemm: Sequence[float] = ()
    device_free: Sequence[float] = ()
    memory_gb: float = 0.0
    disk_mbps: float = 0.0
    skew_s: float = 0.0
    sees_folder: bool = True
    problems: Sequence[str] = ()


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs to measure, in rounds in which no node is in two: the edges of a ring, so each node has two partners."""
    if nodes < 3:
        return [[(0, 1)]] if nodes == 2 else []
    edges = [(node, node + 1) for node in range(nodes - 1)]
    last = [(0, nodes - 1)]
    return [edges[0::2], edges[1::2] + last] if nodes % 2 == 0 else [edges[0::2], edges[1::2], last]


def judge(reports: Mapping[str, Report | None], floors: Floors) -> dict[str, list[str]]:
    """What is wrong with which node, by what each says of itself; None is a node that said nothing in time."""
    present = {name: report for name, report in reports.items() if report is not None}
    found = {name: [] if name in present else ["no report in time"] for name in reports}
    speeds = [speed for report in present.values() for speed in report.gemm]
    typical = median(speeds) if speeds else 0.0
    devices = _most([len(report.gemm) for report in present.values()])
    # the first node, against which clocks and files are compared, may be the bad one
    clock = median_low(report.skew_s for report in present.values()) if len(present) > 2 else 0.0
    elsewhere = 2 * sum(not report.sees_folder for report in present.values()) > len(present)
    for name, report in present.items():
        tell = found[name].append
        for problem in report.problems:
            tell(problem)
        if len(report.gemm) != devices:
            tell(f"{len(report.gemm)} devices, others have {devices}")
        for number, speed in enumerate(report.gemm):
            if speed < floors.gemm_ratio * typical:
                tell(f"device {number} multiplies at {speed:.3g} TFLOP/s, the median is {typical:.3g}")
        for number, free in enumerate(report.device_free):
            if free < floors.device_free:
                tell(f"device {number} has {free:.0%} of its memory free")
        if report.disk_mbps < floors.disk_mbps:
            tell(f"writes {report.disk_mbps:.0f} MB/s to the run directory")
        if report.sees_folder == elsewhere:
            tell("does not see the other nodes' files in the run directory")
        if report.memory_gb < floors.memory_gb:
            tell(f"{report.memory_gb:.1f} GB of memory free")
        if abs(report.skew_s - clock) > floors.skew_s:
            tell(f"its clock is {report.skew_s - clock:+.1f} s off the other nodes'")
        for what in sorted({name for other in present.values() for name in other.versions}):
            usual = _most([other.versions.get(what, "none") for other in present.values()])
            if (own := report.versions.get(what, "none")) != usual:
                tell(f"{what} {own}, others have {usual}")
    return found


def _most(values: Sequence) -> object:
    """The most frequent value, the first of equally frequent ones."""
    return Counter(values).most_common(1)[0][0] if values else None


def blame(speeds: Mapping[tuple[str, str], float | None], floors: Floors) -> tuple[dict[str, str], list[str]]:
    """Which nodes are slow at communication, from the all-reduce of pairs; None is one that failed.

    A node is to blame if it is slow with both of its partners; a good one between two such nodes cannot be told from
    them. One slow pair among good nodes is a link: told only. Slow is by the upper quartile of the pairs, since one bad
    node among three makes two pairs of three slow.

    Args:
        speeds: pair -> GB/s.
    Returns:
        node -> why; and notes.
    """
    known = [speed for speed in speeds.values() if speed is not None]
    typical = sorted(known)[3 * len(known) // 4] if known else 0.0
    slow = {pair for pair, speed in speeds.items() if speed is None or speed < floors.pair_ratio * typical}
    edges = {node: [pair for pair in speeds if node in pair] for pair in speeds for node in pair}
    guilty = {node for node, pairs in edges.items() if all(pair in slow for pair in pairs)}
    found = {node: "; ".join(_pair_text(node, pair, speeds[pair], typical) for pair in edges[node])
             for node in sorted(guilty)}
    notes = [_pair_text(pair[0], pair, speeds[pair], typical) for pair in sorted(slow) if not guilty & set(pair)]
    return found, notes


def _pair_text(node: str, pair: tuple[str, str], speed: float | None, typical: float) -> str:
    other = pair[0] if pair[1] == node else pair[1]
    return (f"all-reduce with {other} failed" if speed is None else
            f"all-reduce with {other} at {speed:.2g} GB/s, good is {typical:.2g}")


def smi_problems(text: str) -> list[str]:
    """What `nvidia-smi --query-gpu=index,<SMI_FIELDS> --format=csv,noheader,nounits` shows to be wrong."""
    found = []
    for line in filter(str.strip, text.splitlines()):
        index, *values = [value.strip() for value in line.split(",")]
        for (name, right), value in zip(SMI_FIELDS.items(), values, strict=False):
            if value != right and value not in _OK_VALUES:
                found.append(f"GPU {index}: {name} is {value}")
    return found


def xid_problems(log: str, uptime_s: float) -> list[str]:
    """Errors of GPUs in the kernel's log of the last day; `uptime_s` is now on the log's clock."""
    found = []
    for at, bus, number in _XID.findall(log):
        if int(number) in XIDS and uptime_s - float(at) < XID_AGE_S:
            found.append(f"GPU {bus}: Xid {number} ({XIDS[int(number)]})")
    return list(dict.fromkeys(found))


def table(reports: Mapping[str, Report | None], found: Mapping[str, Sequence[str]]) -> str:
    """The measurements, a line a node, and below it what is wrong with it."""
    rows = [("node", "devices", "TFLOP/s", "disk MB/s", "memory GB", "clock s", "verdict")]
    for name, report in reports.items():
        verdict = "bad" if found.get(name) else "good"
        rows.append((name, *("-" * 5), verdict) if report is None else (
            name, str(len(report.gemm)), f"{min(report.gemm, default=0):.3g}", f"{report.disk_mbps:.0f}",
            f"{report.memory_gb:.1f}", f"{report.skew_s:+.3f}", verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for number, name in enumerate(reports, start=1):
        lines[number] += "".join(f"\n    {problem}" for problem in found.get(name, ()))
    return "\n".join(lines)


def report_from(values: Mapping[str, object]) -> Report:
    """What `dataclasses.asdict` made of a report, after JSON."""
    return Report(**{one.name: values[one.name] for one in fields(Report) if one.name in values})
