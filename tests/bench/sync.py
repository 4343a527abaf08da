"""Ways of publishing weights against a raw broadcast of the same bytes, between one trainer and some engines on this
host; and what changes in bf16 weights at small learning rates.

    python tests/bench/sync.py ways [--engines 2] [--hidden 512] [--layers 8] [--vocab 32000] [--rounds 5]
    python tests/bench/sync.py changes [--steps 6]

ways: a dense random model in bf16, a step of Adam at 1e-6 between the rounds, embedded engines in one set. `seconds` is
the whole of `WeightPublisher.publish`, `paused` what the engines lose of it, `blocked` what the trainer waits for with
sync.overlap. `raw` is a gloo broadcast of as many bytes as the model has, in pieces as large as the buckets, to as many
processes, which drop them; it takes turns with the ways. Medians over the rounds.

changes: tensors of Qwen3-30B-A3B's shapes under torch's Adam, with gradients that are half noise and half direction:
how many elements differ from one step to the next, and what the changes take, packed, of the whole.
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

WAYS = ("broadcast", "disk", "delta")
SHAPES = {"expert gate_proj": (768, 2048), "expert down_proj": (2048, 768), "q_proj": (4096, 2048),
          "router": (128, 2048), "part of the embedding": (16384, 2048)}


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


class Adam:
    """Steps of torch's Adam on fp32 copies of bf16 parameters."""

    def __init__(self, parameters: list[Any], lr: float, seed: int = 0) -> None:
        import torch

        self._parameters = parameters
        self._masters = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
        self._generator = torch.Generator().manual_seed(seed)
        self._directions = [self._noise(master) for master in self._masters]
        self._adam = torch.optim.Adam(self._masters, lr=lr, betas=(0.9, 0.98))

    def _noise(self, like: Any) -> Any:
        import torch

        return torch.randn(like.shape, generator=self._generator)

    def step(self) -> None:
        import torch

        for master, direction in zip(self._masters, self._directions, strict=True):
            master.grad = direction + self._noise(master)
        self._adam.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


def trainer(rank: int, model: str, urls: list[str], rounds: int, bucket_mb: int, folder: str) -> dict[str, Any]:
    """Rows of (seconds, paused, blocked, bytes) for each way, and the seconds of `raw`."""
    import torch
    import torch.distributed as dist
    from test_publish import trainers

    from megarl.config.layout import Layout
    from megarl.rollout.fleet import EngineRecord
    from megarl.sync.publish import WeightPublisher

    chunks, hf, config = trainers(Layout(1), Path(model), bucket_mb=bucket_mb, verify=False, timeout_s=300.0,
                                  directory=folder, dtype="bf16")
    records = [EngineRecord(f"0.{number}", 1, url, "up") for number, url in enumerate(urls)]
    fleet = SimpleNamespace(engines=lambda: records, mark_synced=lambda *_: None)
    adam = Adam([parameter for chunk in chunks for parameter in chunk.parameters()], 1e-6)

    def publisher(way: str, overlap: bool) -> WeightPublisher:
        sync = config.sync.model_copy(update={"transport": way, "overlap": overlap})
        return WeightPublisher(chunks, hf, config.model_copy(update={"sync": sync}), address="127.0.0.1",
                               generation=f"{way}{overlap}", fleet=fleet)

    publishers = {(way, overlap): publisher(way, overlap) for way in WAYS for overlap in (False, True)}
    size = publishers["broadcast", False].publish("first:0").bytes
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [subprocess.Popen([sys.executable, __file__, "receive", *map(str, (
        store.port, number + 1, len(urls) + 1, size, bucket_mb << 20, rounds + 1))]) for number in range(len(urls))]
    group, buffer = raw_group(store, 0, len(urls) + 1), torch.zeros(bucket_mb << 20, dtype=torch.uint8)
    found: dict[str, Any] = {"size": size, "raw": [], **{key: [] for key in publishers}}
    for number in range(rounds + 1):
        for key, one in publishers.items():
            one.publish(f"{key[0]}{key[1]}:{2 * number}")  # what the engines hold is this way's
            adam.step()
            begun = time.perf_counter()
            one.start(f"{key[0]}{key[1]}:{2 * number + 1}")
            blocked = time.perf_counter() - begun
            report = one.finish()
            if number:  # the first one makes groups and copies
                found[key].append((report.seconds, report.paused_s, blocked, report.bytes))
        begun = time.perf_counter()
        raw_broadcast(group, size, bucket_mb << 20, buffer)
        if number:
            found["raw"].append(time.perf_counter() - begun)
    for other in others:
        other.wait(60)
    for one in publishers.values():
        one.close()
    return found


def ways(given: argparse.Namespace) -> None:
    """Print the first table."""
    import test_publish
    import torch
    from models import save_hf_model
    from worlds import run_world

    with tempfile.TemporaryDirectory() as folder:
        model = save_hf_model("llama", Path(folder) / "model", dtype=torch.bfloat16, hidden_size=given.hidden,
                              vocab_size=given.vocab, intermediate_size=4 * given.hidden,
                              num_hidden_layers=given.layers, initializer_range=0.02)
        engines = [test_publish.EngineUnderTest(model, "--dtype", "bfloat16") for _ in range(given.engines)]
        try:
            found = run_world(1, trainer, str(model), [engine.url for engine in engines], given.rounds,
                              given.bucket_mb, f"{folder}/versions", timeout=900)[0]
        finally:
            for engine in engines:
                engine.stop()
    raw = statistics.median(found["raw"])
    print(f"{found['size'] / 2**20:.1f} MiB in bf16 to {given.engines} engines in buckets of {given.bucket_mb} MiB; "
          f"raw broadcast {raw:.3f} s ({', '.join(f'{value:.3f}' for value in found['raw'])})")
    print("way        overlap  seconds  / raw  paused  blocked   MiB to each engine")
    for way, overlap in [(way, overlap) for way in WAYS for overlap in (False, True)]:
        seconds, paused, blocked, size = (
            statistics.median(column) for column in zip(*found[way, overlap], strict=True))
        print(f"{way:10} {'yes' if overlap else 'no':7} {seconds:8.3f} {seconds / raw:6.2f} {paused:7.3f} "
              f"{blocked:8.3f} {size / 2**20:9.2f} ({size / found['size']:.2%})")


def changes(given: argparse.Namespace) -> None:
    """Print the second table."""
    import torch

    from megarl.sync import delta

    print("lr      step  changed elements  packed / whole  bytes a change   MB/s compared   applied")
    for lr in (1e-6, 5e-6, 2e-5):
        generator = torch.Generator().manual_seed(1)
        tensors = [(0.02 * torch.randn(shape, generator=generator)).bfloat16() for shape in SHAPES.values()]
        whole, adam = sum(tensor.nbytes for tensor in tensors), Adam(tensors, lr)
        for step in range(1, given.steps + 1):
            before = [tensor.clone() for tensor in tensors]
            adam.step()
            begun = time.perf_counter()
            found = [delta.compare(name, new, old) for name, new, old in zip(SHAPES, tensors, before, strict=True)]
            compared, begun = time.perf_counter() - begun, time.perf_counter()
            for change, old in zip(found, before, strict=True):
                delta.apply(change, old)
            applied = time.perf_counter() - begun
            assert all(torch.equal(new.view(torch.int16), old.view(torch.int16))
                       for new, old in zip(tensors, before, strict=True))
            count, size = sum(change.count for change in found), sum(change.bytes for change in found)
            print(f"{lr:.0e} {step:6d} {count / (whole / 2):17.2%} {size / whole:15.2%} {size / max(count, 1):15.2f} "
                  f"{whole / compared / 1e6:15.0f} {whole / applied / 1e6:9.0f}")


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ways", "changes", "receive"])
    parser.add_argument("numbers", type=int, nargs="*", help=argparse.SUPPRESS)
    for name, default in (("engines", 2), ("hidden", 512), ("layers", 8), ("vocab", 32000), ("rounds", 5),
                          ("bucket-mb", 64), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.what == "receive":
        receiver(*given.numbers)
    else:
        {"ways": ways, "changes": changes}[given.what](given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
