"""Ordering bench: simulated makespan of a step by the order of its micro-batches.

    python tests/bench/ordering.py [--ranks 8] [--microbatches 32] [--seeds 30] [--kind conv]

Lengths: `conv` are single conversations (tests/bench/data, prompt + answer); `packed` are micro-batches that
`data.packing` makes of 256 of them under a cap of 4,096 tokens, for one data-parallel rank (the number of micro-batches
follows); `tail` are log-normal with sigma 1. Time is proportional to `sequence_cost`, F = I = W.

Columns: mean over the seeds of makespan / work of a rank (1.0: no bubble) in arrival order, long first, short at both
ends, and in the order of `pipeline.order`; the share of the bubble of the best other one that ours removes; how
often ours is slower than arrival; CPU time of one `order`. With --sure, also the best of 20 times as many trials.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from megarl.data.packing import plan_packs, sequence_cost  # noqa: E402
from megarl.pipeline import order as ordering  # noqa: E402
from megarl.pipeline.choose import model_costs  # noqa: E402
from megarl.pipeline.generators import SCHEDULES  # noqa: E402
from megarl.pipeline.simulate import simulator  # noqa: E402


def costs_of(kind: str, count: int, seed: int) -> np.ndarray:
    """Relative costs of the micro-batches in arrival order."""
    draw = np.random.default_rng(seed)
    if kind == "tail":
        return sequence_cost(np.exp(draw.normal(np.log(4000), 1.0, count))).astype(float)
    table = np.loadtxt(ROOT / "tests/bench/data/azure_conv.csv", delimiter=",", skiprows=1, dtype=np.int64).sum(axis=1)
    if kind == "conv":
        return sequence_cost(draw.choice(table, count)).astype(float)
    plan = plan_packs(np.minimum(draw.choice(table, 256), 4096), ranks=1, max_tokens=4096)
    return draw.permutation(plan.cost[0]).astype(float)


def more_trials(costs, name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The same search with 20 times as many trials."""
    kept = ordering._EFFORT, ordering._MOST_ROUNDS
    ordering._EFFORT, ordering._MOST_ROUNDS = 20 * kept[0], 20 * kept[1]
    try:
        return ordering.order.__wrapped__(costs, name, ranks, chunks)
    finally:
        ordering._EFFORT, ordering._MOST_ROUNDS = kept


def measure(name: str, options: argparse.Namespace) -> None:
    """One line of the table."""
    rows, times = [], []
    chunks = SCHEDULES[name].chunks
    for seed in range(options.seeds):
        weights = costs_of(options.kind, options.microbatches, seed)
        weights /= weights.mean()
        simulated = simulator(name, options.ranks, len(weights), chunks)
        costs = model_costs(options.ranks, simulated.schedule.stages, weights, (1, 1, 1), options.hop)
        start = time.process_time()
        ours = ordering.order.__wrapped__(costs, name, options.ranks, chunks)
        times.append((time.process_time() - start) * 1e3)
        orders = [range(len(weights)), ordering.long_first(costs), ordering.short_at_both_ends(costs), ours]
        orders += [more_trials(costs, name, options.ranks, chunks)] if options.sure else []
        rows.append(simulated.makespans(costs, np.array([list(one) for one in orders])) / (3 * len(weights)))
    table = np.array(rows)
    mean = table.mean(axis=0)
    other = table[:, :3].min(axis=1)
    removed = 1 - (table[:, 3] - 1).sum() / (other - 1).sum()
    print(f"| {name:11} | " + " | ".join(f"{value:.3f}" for value in mean[:4]) + f" | {100 * removed:.0f} % | "
          f"{int((table[:, 3] > table[:, 0]).sum())} | {statistics.median(times):.0f} (max {max(times):.0f}) |"
          + (f" {mean[4]:.3f} |" if options.sure else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--kind", choices=("conv", "packed", "tail"), default="conv")
    parser.add_argument("--hop", type=float, default=0.0, help="time of a transfer; F is 1")
    parser.add_argument("--sure", action="store_true")
    options = parser.parse_args()
    print(f"{options.kind}, {options.ranks} ranks, {options.seeds} seeds")
    print("| schedule | arrival | long first | short at both ends | ours | bubble removed | slower | ms |"
          + (" 20 x trials |" if options.sure else ""))
    print("|---|---|---|---|---|---|---|---|" + ("---|" if options.sure else ""))
    for name in SCHEDULES:
        measure(name, options)


if __name__ == "__main__":
    main()
