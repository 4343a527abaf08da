"""Measures this node and its links to the others, and has the first node judge all of them (see `preflight`).

Every node runs this at the same time; they meet at a store on the first node. Whoever is not there in time is told by
name and left out of what follows, so a dead node costs the deadline and nothing else.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import secrets
import subprocess
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.cluster import preflight
from megarl.cluster.preflight import SMI_FIELDS, Floors, Report
from megarl.errors import MachineFault

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "flash-attn", "pydantic")
DISK_MB = 64
CANARY = ".preflight"  # a file in the run directory
FREE_S = 30.0
GROUP_S = 60.0  # for a group to be made, and for one of its collectives


@dataclass(frozen=True)
class Place:
    """This node among those that are examined; the first has `rank` 0 and hosts the store at address:port."""

    name: str
    count: int
    rank: int
    address: str
    port: int


@dataclass(frozen=True)
class Verdict:
    """What the first node found.

    Attributes:
        reports: of each node by name, None where there was none in time.
        found: what is wrong with each node; a node without anything wrong has an empty list.
        notes: what is no single node's fault.
        allreduce_gbps: bandwidth of the all-reduce over all good nodes; None with a single device, or where it failed.
    """

    reports: Mapping[str, Report | None]
    found: Mapping[str, Sequence[str]]
    notes: Sequence[str]
    allreduce_gbps: float | None


def examine(place: Place, folder: Path, floors: Floors, deadline_s: float) -> Verdict | None:
    """Measure this node, then with all the others their links.

    Args:
        place: this node.
        folder: on the file system that all nodes share, where the run writes.
        floors: what a node must reach.
        deadline_s: from now until every node must have its report in.
    Returns:
        On the first node the verdict, None elsewhere.
    Raises:
        MachineFault: the first node could not be reached, or went on without this one.
    """
    timeout = datetime.timedelta(seconds=deadline_s + 5 * GROUP_S)  # others may wait for a pair that hangs
    try:
        store = dist.TCPStore(place.address, place.port, is_master=place.rank == 0, wait_for_workers=False,
                              timeout=timeout)
        if place.rank == 0:
            place = replace(place, port=store.port)
            store.set("canary", _write_canary(folder))
        store.set(f"report/{place.rank}", json.dumps([place.name, asdict(_measure_node(folder, store, floors))]))
        if place.rank == 0:
            store.set("present", json.dumps(_wait_for_reports(store, place.count, deadline_s)))
        present = json.loads(store.get("present"))  # all wait here, so all read their clocks at the same moment
        store.set(f"clock/{place.rank}", str(time.time()))
        if place.rank == 0:
            (folder / CANARY).unlink(missing_ok=True)
        if place.rank not in present:
            raise MachineFault(f"{place.name} was not ready within {deadline_s:.0f} s")
        _measure_pairs(store, place, present)
        verdict = _judge(store, place, present, floors) if place.rank == 0 else None
        good = json.loads(store.get("good"))
        many = good and len(good) * _devices() > 1
        if place.rank in good and many:
            speed = _allreduce(store, "all", place, good)
            if place.rank == good[0]:
                store.set("allreduce", json.dumps(speed))
        if verdict is not None and many:
            verdict = _with_allreduce(verdict, json.loads(store.get("allreduce")), floors)
        _leave(store, place, present)
    except dist.DistError as error:
        raise MachineFault(f"{place.name}: the nodes lost each other: {str(error).splitlines()[0]}") from error
    return verdict


def _wait_for_reports(store: dist.Store, count: int, deadline_s: float) -> list[int]:
    """The nodes whose reports came in time."""
    deadline = time.monotonic() + deadline_s
    while True:
        there = [rank for rank in range(count) if store.check([f"report/{rank}"])]
        if len(there) == count or time.monotonic() > deadline:
            return there
        time.sleep(0.1)


def _judge(store: dist.Store, place: Place, present: Sequence[int], floors: Floors) -> Verdict:
    """What the reports and the pairs show; tells all nodes which are good."""
    names = os.environ.get("MEGARL_NODES", "").split()
    clocks = {rank: float(store.get(f"clock/{rank}")) for rank in present}
    reports: dict[str, Report | None] = {}
    ranks: dict[str, int] = {}
    for rank in range(place.count):
        name, report = names[rank] if len(names) == place.count else f"node {rank}", None
        if rank in present:
            name, values = json.loads(store.get(f"report/{rank}"))
            report = replace(preflight.report_from(values), skew_s=clocks[rank] - clocks[0])
        reports[name], ranks[name] = report, rank
    found = preflight.judge(reports, floors)
    by_rank = {rank: name for name, rank in ranks.items()}
    speeds = {(by_rank[first], by_rank[second]): json.loads(store.get(f"pair/{first}-{second}"))
              for pairs in _rounds(present) for first, second in pairs}
    guilty, notes = preflight.blame(speeds, floors)
    for name, why in guilty.items():
        found[name].append(why)
    store.set("good", json.dumps([ranks[name] for name, problems in found.items() if not problems]))
    return Verdict(reports, found, notes, None)


def _with_allreduce(verdict: Verdict, speed: float | None, floors: Floors) -> Verdict:
    """A failure or a speed below the floor over nodes that are all good by themselves is told of all of them."""
    why = ("the all-reduce over all good nodes failed" if speed is None else
           f"the all-reduce over all good nodes runs at {speed:.3g} GB/s, below {floors.allreduce_gbps:.3g}"
           if speed < floors.allreduce_gbps else "")
    return replace(verdict, allreduce_gbps=speed, notes=[*verdict.notes, *([why] if why else [])])


def _leave(store: dist.Store, place: Place, present: Sequence[int]) -> None:
    """The first node, which hosts the store, leaves last."""
    left, deadline = store.add("left", 1), time.monotonic() + 10.0
    while place.rank == 0 and left < len(present) and time.monotonic() < deadline:
        time.sleep(0.05)
        left = store.add("left", 0)


# --- one node


def _measure_node(folder: Path, store: dist.Store, floors: Floors) -> Report:
    problems, free = [], _device_free(floors.device_free)
    try:
        speeds = [_gemm(number) for number in range(_devices())]
    except (RuntimeError, torch.AcceleratorError) as error:
        speeds, problems = [], [f"matrix products fail: {str(error).splitlines()[0]}"]
    disk_mbps = 0.0
    try:
        disk_mbps = _disk(folder)
    except OSError as error:
        problems.append(f"cannot write to {folder}: {error.strerror}")
    canary, deadline = store.get("canary").decode(), time.monotonic() + 10.0  # a file server's caches may be older
    while not (seen := _sees(folder, canary)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return Report(versions=_versions(), gemm=speeds, device_free=free, disk_mbps=disk_mbps, sees_folder=seen,
                  memory_gb=_available_gb(Path("/proc/meminfo").read_text()),
                  problems=[*problems, *_hardware_problems()])


def _devices() -> int:
    """GPUs of this node; without any, the CPU counts as one device."""
    return torch.cuda.device_count() or 1


def _device_free(wanted: float) -> list[float]:
    """The free part of each GPU's memory; waits a while for ranks of an earlier life that are still ending."""
    deadline = time.monotonic() + FREE_S
    while True:
        found = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
        free = [have / total for have, total in found]
        if min(free, default=1.0) >= wanted or time.monotonic() > deadline:
            return free
        time.sleep(1.0)


def _gemm(number: int) -> float:
    """TFLOP/s of a device at square matrix products: bf16 and long enough to heat up on a GPU, fp32 on a CPU."""
    on_gpu = torch.cuda.is_available()
    size, dtype, times = (8192, torch.bfloat16, 50) if on_gpu else (768, torch.float32, 5)
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(3):  # the first warms up; a CPU is shared with others, so the best counts
        begun = time.perf_counter()
        for _ in range(times):
            product = left @ right
        product[0, 0].item()
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 * times / best / 1e12


def _disk(folder: Path) -> float:
    """MB/s of writing a file and syncing it."""
    path, block = folder / f".preflight-{platform.node()}-{secrets.token_hex(4)}", os.urandom(1 << 20)
    begun = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(DISK_MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return DISK_MB * (1 << 20) / 1e6 / (time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)


def _write_canary(folder: Path) -> str:
    token = secrets.token_hex(8)
    with suppress(OSError):  # told by `_disk`
        (folder / CANARY).write_text(token)
    return token


def _sees(folder: Path, canary: str) -> bool:
    try:
        return (folder / CANARY).read_text() == canary
    except OSError:
        return False


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "megarl's sources": _sources()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = drivers.partition("\n")[0]
    return found


def _sources() -> str:
    """A short name for what megarl's modules hold."""
    root, total = Path(__file__).parents[1], 0
    for path in sorted(root.rglob("*.py")):
        total = zlib.crc32(path.read_bytes(), total)
    return f"{total:08x}"


def _available_gb(meminfo: str) -> float:
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024 / 1e9


def _hardware_problems() -> list[str]:
    """What driver and kernel tell of the GPUs; the kernel's log is closed to users on some hosts: then nothing."""
    smi = _output("nvidia-smi", f"--query-gpu=index,{','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return [*preflight.smi_problems(smi), *preflight.xid_problems(_output("dmesg"), uptime)]


def _output(*command: str) -> str:
    """A program's output; "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- between nodes


def _rounds(present: Sequence[int]) -> list[list[tuple[int, int]]]:
    return [[(present[first], present[second]) for first, second in pairs] for pairs in preflight.rounds(len(present))]


def _measure_pairs(store: dist.Store, place: Place, present: Sequence[int]) -> None:
    for pairs in _rounds(present):
        for pair in pairs:
            if place.rank in pair:
                speed = _allreduce(store, f"{pair[0]}-{pair[1]}", place, pair)
                if place.rank == pair[0]:
                    store.set(f"pair/{pair[0]}-{pair[1]}", json.dumps(speed))


def _allreduce(store: dist.Store, name: str, place: Place, members: Sequence[int]) -> float | None:
    """GB/s on each rank's links in an all-reduce over all devices of these nodes; None if it failed."""
    each, index = _devices(), list(members).index(place.rank)
    ranks = [(index * each + local, each * len(members), local) for local in range(each)]
    if not torch.cuda.is_available():
        return _timed_allreduce(place, name, *ranks[0])
    # NCCL ends the process whose collective hangs: each measurement has processes of its own
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_answer, args=(answers, place, name, *rank), daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 2 * GROUP_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        process.kill()
        process.join()
    speeds = []
    while not answers.empty():
        speeds.append(answers.get())
    return min(speeds) if len(speeds) == each and None not in speeds else None


def _answer(answers: multiprocessing.SimpleQueue, *rank: object) -> None:
    answers.put(_timed_allreduce(*rank))


def _timed_allreduce(place: Place, name: str, rank: int, world: int, local: int) -> float | None:
    on_gpu, timeout = torch.cuda.is_available(), datetime.timedelta(seconds=GROUP_S)
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        store = dist.PrefixStore(f"group/{name}", dist.TCPStore(
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timeout))
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        tensor = torch.ones((256 if on_gpu else 8) << 18, device=device)  # 256 or 8 MiB
        times = []
        for _ in range(4):  # the first connects
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()
            times.append(time.perf_counter() - begun)
        return 2 * (world - 1) / world * tensor.nbytes / 1e9 / min(times[1:])
    except (RuntimeError, dist.DistError):
        return None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
