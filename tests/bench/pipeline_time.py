"""The simulator against the clock: stages whose operations sleep for set times, on 4 and on 8 processes.

    python tests/bench/pipeline_time.py [--ranks 4 8] [--repeats 5]

Each operation sleeps instead of computing, so any number of processes runs at full speed on two cores. A micro-batch's
forward takes 50 to 100 ms a stage (other lengths, other times), an input gradient 1.1 times and a weight gradient 0.9
times that. Printed for each schedule: the simulated makespan, the median of the measured ones (from the first
operation's start on any rank to the last one's end), and their difference as a share. Then the executor's own time:
the part of a run on one rank that is spent outside operations, per operation, with operations that do nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipev")
FORWARD_S, INPUT, WEIGHT = 0.05, 1.1, 0.9
HIDDEN = 64


class Sleeping(torch.autograd.Function):
    """Takes the batch's time in the forward, the backward, and (when it is asked for) the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chunk: Any, seconds: float) -> torch.Tensor:
        ctx.chunk, ctx.seconds = chunk, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        seconds, waiting = ctx.seconds, ctx.chunk.weight_gradients
        time.sleep(INPUT * seconds)
        if waiting.deferring:
            waiting.collect(lambda: time.sleep(WEIGHT * seconds))
        else:
            time.sleep(WEIGHT * seconds)
        return grad, None, None


class Stage(torch.nn.Module):
    """A chunk that only takes time."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.zeros(1, 1, HIDDEN)) if is_first else None
        self.weight_gradients, self.input = None, None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.input = tensor

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        x = self.start.expand(len(batch.tokens_t), 1, HIDDEN) if self.start is not None else self.input
        return Sleeping.apply(x, self, batch.seconds)


def batches(count: int, scale: float = 1.0) -> list[SimpleNamespace]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, 129, (count,), generator=generator).tolist()
    return [SimpleNamespace(tokens_t=torch.zeros(n, dtype=torch.int64), seconds=scale * FORWARD_S * n / 64)
            for n in tokens]


def executor(ranks: int, name: str) -> Any:
    from megarl.config.layout import Layout
    from megarl.pipeline.execute import Executor
    from megarl.pipeline.generators import SCHEDULES as FAMILIES

    family = FAMILIES[name]
    layout = Layout(ranks, pipeline=ranks, placement=family.placement, chunks=family.chunks)
    held = [stage for stage, holders in enumerate(layout.placement_table) if dist.get_rank() in holders]
    return Executor([Stage(stage == 0) for stage in held], layout, HIDDEN, torch.float32,
                    range(ranks) if ranks > 1 else (), 60.0)


def loss(hidden: torch.Tensor, chunk: Any, batch: Any) -> tuple[torch.Tensor, dict]:
    return hidden.sum(), {}


def measure(rank: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    from megarl.pipeline import trace

    found = {}
    for name in SCHEDULES:
        runner, given = executor(ranks, name), batches(2 * ranks)
        found[name] = []
        for _ in range(repeats):
            dist.barrier()
            runner.train(given, loss, name, timed=True)
            spans: list[Any] = [None] * ranks
            dist.all_gather_object(spans, runner.spans)
            found[name].append(trace.timeline(sum(spans, [])).makespan)
    return found


def own_time(rank: int, repeats: int) -> list[float]:
    """Seconds per operation outside operations, on one rank."""
    runner, given, shares = executor(1, "1f1b"), batches(100, 0.0), []
    for _ in range(repeats):
        begun = time.perf_counter()
        runner.train(given, loss, "1f1b", timed=True)
        spent = time.perf_counter() - begun
        shares.append((spent - sum(span.end - span.start for span in runner.spans)) / len(runner.spans))
    return shares


def main() -> None:
    """The table."""
    from worlds import run_world

    from megarl.pipeline.generators import fitting
    from megarl.pipeline.simulate import Costs, simulate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    for ranks in given.ranks:
        measured = run_world(ranks, measure, ranks, given.repeats)[0]
        for name, makespans in measured.items():
            schedule, instead = fitting(name, ranks, 2 * ranks, 1 if name in ("1f1b", "zb-h1") else 2)
            assert not instead
            seconds = [batch.seconds for batch in batches(2 * ranks)]
            expected = simulate(schedule, Costs.scaled(schedule.stages, seconds, input_grad=INPUT,
                                                       weight_grad=WEIGHT)).makespan
            middle = statistics.median(makespans)
            print(f"P={ranks} M={2 * ranks} {name:10s} simulated {expected:7.3f} s  measured {middle:7.3f} s "
                  f"(of {len(makespans)}: {min(makespans):.3f} .. {max(makespans):.3f})  "
                  f"difference {middle / expected - 1:+.2%}", flush=True)
    shares = run_world(1, own_time, given.repeats)[0]
    print(f"executor's own time: {statistics.median(shares) * 1e6:.0f} us per operation")


if __name__ == "__main__":
    main()
