"""Publishing weights against a raw broadcast of the same bytes, between one trainer and some engines on this host.

    python tests/bench/sync.py [--engines 2] [--hidden 512] [--layers 8] [--vocab 32000] [--rounds 5] [--bucket-mb 64]

What is measured: a dense random model in fp32. `publish` is the whole of `WeightPublisher.publish` into embedded
engines: pause, flush, begin, gather, buckets (HTTP and gloo broadcast, copied into place by the engine), end, version,
continue. `raw` is a gloo broadcast of as many bytes, in pieces as large as the buckets, to as many processes, which
drop them. The two take turns; the table gives each round and the medians.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dist")]


def raw_group(store: Any, rank: int, size: int) -> Any:
    """A gloo group over `store`, outside torch.distributed's default group."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, size, timeout=datetime.timedelta(seconds=300))


def raw_broadcast(group: Any, size: int, piece: int, buffer: Any) -> None:
    """`size` bytes from rank 0 in pieces; returns when all have them."""
    import torch.distributed as dist

    for start in range(0, size, piece):
        group.broadcast([buffer[: min(piece, size - start)]], dist.BroadcastOptions()).wait()
    group.barrier(dist.BarrierOptions()).wait()


def receiver(port: int, rank: int, processes: int, size: int, piece: int, rounds: int) -> None:
    """The other side of `raw`, a process of its own."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group, buffer = raw_group(store, rank, processes), torch.zeros(piece, dtype=torch.uint8)
    for _ in range(rounds):
        raw_broadcast(group, size, piece, buffer)


def trainer(rank: int, model: str, urls: list[str], rounds: int, bucket_mb: int) -> list[tuple[float, float, int]]:
    """(seconds of publish, seconds of raw, bytes) of each round."""
    import torch
    import torch.distributed as dist
    from test_publish import trainers

    from megarl.config.layout import Layout
    from megarl.rollout.fleet import EngineRecord
    from megarl.sync.publish import WeightPublisher

    layout = Layout(1)
    chunks, hf, config = trainers(layout, Path(model), bucket_mb=bucket_mb, verify=False, timeout_s=300.0)
    records = [EngineRecord(f"0.{number}", 1, url, "up") for number, url in enumerate(urls)]
    fleet = SimpleNamespace(engines=lambda: records, mark_synced=lambda *_: None)
    publisher = WeightPublisher(chunks, hf, config, address="127.0.0.1", generation="b", fleet=fleet)
    size, piece = publisher.publish("b:0").bytes, bucket_mb << 20  # the first one makes the groups
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [subprocess.Popen([sys.executable, __file__, "--receive", *map(
        str, (store.port, number + 1, len(urls) + 1, size, piece, rounds + 1))]) for number in range(len(urls))]
    group, buffer = raw_group(store, 0, len(urls) + 1), torch.zeros(piece, dtype=torch.uint8)
    raw_broadcast(group, size, piece, buffer)
    found = []
    for number in range(rounds):
        report = publisher.publish(f"b:{number + 1}")
        begun = time.perf_counter()
        raw_broadcast(group, size, piece, buffer)
        found.append((report.seconds, time.perf_counter() - begun, report.bytes))
    for other in others:
        other.wait(60)
    publisher.close()
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("engines", 2), ("hidden", 512), ("layers", 8), ("vocab", 32000), ("rounds", 5),
                          ("bucket-mb", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--receive", type=int, nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receive:
        receiver(*given.receive)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import test_publish
    from models import save_hf_model
    from worlds import run_world

    with tempfile.TemporaryDirectory() as folder:
        model = save_hf_model("llama", Path(folder) / "model", hidden_size=given.hidden, vocab_size=given.vocab,
                              intermediate_size=4 * given.hidden, num_hidden_layers=given.layers)
        engines = [test_publish.EngineUnderTest(model) for _ in range(given.engines)]
        try:
            rounds = run_world(1, trainer, str(model), [engine.url for engine in engines], given.rounds,
                               given.bucket_mb, timeout=600)[0]
        finally:
            for engine in engines:
                engine.stop()
    print(f"{rounds[0][2] / 2**20:.0f} MiB to {given.engines} engines in buckets of {given.bucket_mb} MiB")
    for publish_s, raw_s, _ in rounds:
        print(f"  publish {publish_s:6.3f} s   raw {raw_s:6.3f} s   ratio {publish_s / raw_s:.2f}")
    publish_s, raw_s = (statistics.median(column) for column in list(zip(*rounds, strict=True))[:2])
    print(f"median: publish {publish_s:.3f} s, raw {raw_s:.3f} s, ratio {publish_s / raw_s:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
