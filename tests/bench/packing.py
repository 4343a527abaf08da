"""Packing bench: bins, lockstep balance, violations and time of `megarl.data.packing.plan_packs`.

    python tests/bench/packing.py [--seeds 20] [--samples 512] [--ranks 8]

Lengths: `conv` are conversation lengths (tests/bench/data, prompt + answer, cut at the cap); `tail` are log-normal with
sigma 1 and a median of 4k (cap 32k) or 6k (cap 64k), cut at the cap as responses are that reach the length limit.

Columns: best fit's bins over a lower bound (Martello-Toth L2); the plan's bins over best fit's rounded up to full
slots; lockstep balance = useful cost / (ranks x sum over slots of the most expensive bin) of best fit alone (its bins
sorted into slots), of the plan, and an upper bound of what any plan could reach (see `balance_bound`).
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

from megarl.data import packing  # noqa: E402


def lengths_of(kind: str, cap: int, count: int, seed: int) -> np.ndarray:
    """int64 [count], each within [1, cap]."""
    random = np.random.default_rng(seed)
    if kind == "conv":
        table = np.loadtxt(ROOT / "tests/bench/data/azure_conv.csv", delimiter=",", skiprows=1, dtype=np.int64)
        return np.minimum(random.choice(table.sum(axis=1), count), cap)
    median = {32768: 4000, 65536: 6000}[cap]
    return np.exp(random.normal(np.log(median), 1.0, count)).astype(np.int64).clip(64, cap)


def bins_bound(sizes: np.ndarray, cap: int) -> int:
    """Martello and Toth (1990), L2: no packing of `sizes` into bins of `cap` needs fewer."""
    best = -(-int(sizes.sum()) // cap)
    for threshold in {0, *sizes[sizes <= cap // 2].tolist()}:
        large = int((sizes > cap - threshold).sum())
        middle = sizes[(sizes > cap // 2) & (sizes <= cap - threshold)]
        small = sizes[(sizes <= cap // 2) & (sizes >= threshold)]
        missing = int(small.sum()) - (len(middle) * cap - int(middle.sum()))
        best = max(best, large + len(middle) + max(0, -(-missing // cap)))
    return best


def balance_bound(sizes: np.ndarray, ranks: int, cap: int) -> float:
    """No plan under this cap, with however many bins, can have a better lockstep balance.

    Samples above half the cap are in bins of their own, so slot s (sorted) costs at least what the (s * ranks)-th of
    them costs. The k dearest bins hold at most F(k); the bins after slot t therefore hold the rest, and their ranks
    work at least that long. F(k) sums, over the k best bins, the sample above half the cap plus its room filled at the
    density of the longest sample that fits it; or all k caps filled with the longest samples, if that is less.
    """
    order = np.sort(sizes)[::-1]
    cost = packing.sequence_cost(order).astype(np.float64)
    density = cost / order
    large = order[order > cap // 2]
    rooms = cap - large
    fits = np.searchsorted(-order, -rooms)
    filled = np.where(fits < len(order), rooms * density[np.minimum(fits, len(order) - 1)], 0.0)
    others = cap * density[len(large)] if len(large) < len(order) else 0.0
    dearest = np.sort(np.concatenate((cost[:len(large)] + filled, np.full(len(order), others))))[::-1]
    held = np.concatenate(([0.0], np.cumsum(dearest)))
    tokens, costs = np.concatenate(([0], np.cumsum(order))), np.concatenate(([0.0], np.cumsum(cost)))
    total = paid = float(cost.sum())
    slots = 0.0
    for slot in range(1 + max(len(large) - 1, 0) // ranks):
        slots += cost[slot * ranks]
        bins = (slot + 1) * ranks
        rest = total - min(held[min(bins, len(held) - 1)], np.interp(bins * cap, tokens, costs))
        paid = max(paid, ranks * slots + max(0.0, rest))
    return total / paid


def best_fit_balance(sizes: np.ndarray, ranks: int, cap: int) -> float:
    """Lockstep balance of plain best-fit-decreasing, its bins sorted by cost into slots."""
    order = np.argsort(-sizes, kind="stable").tolist()
    cost = packing.sequence_cost(sizes)
    spent = np.sort([int(cost[one].sum()) for one in packing._best_fit(order, sizes.tolist(), cap)])[::-1]
    return float(spent.sum() / (ranks * spent[::ranks].sum()))


def violations(plan: packing.PackingPlan, sizes: np.ndarray, cap: int) -> int:
    """Bins above the cap, samples missing or doubled, ranks with another number of slots: counted from the lists."""
    bins = [one for row in plan.bins for one in row]
    over = sum(int(sizes[one].sum()) > cap for one in bins if one)
    seen = np.bincount([i for one in bins for i in one], minlength=len(sizes))
    return over + int((seen != 1).sum()) + sum(len(row) != plan.slots for row in plan.bins)


def measure(kind: str, cap: int, options: argparse.Namespace) -> None:
    """One line of the table, over all seeds."""
    rows, times = [], []
    for seed in range(options.seeds):
        sizes = lengths_of(kind, cap, options.samples, seed)
        for _ in range(3):
            start = time.perf_counter()
            plan = packing.plan_packs(sizes, ranks=options.ranks, max_tokens=cap)
            times.append((time.perf_counter() - start) * 1e3)
        rounded = packing.padded(plan.best_fit_bins, options.ranks)
        rows.append((plan.best_fit_bins / bins_bound(sizes, cap), plan.slots * options.ranks / rounded,
                     best_fit_balance(sizes, options.ranks, cap), plan.balance,
                     balance_bound(sizes, options.ranks, cap), violations(plan, sizes, cap)))
    table = np.array(rows)
    share = table[:, 3] / table[:, 4]
    mean = table.mean(axis=0)
    print(f"{kind:4} {cap // 1024:3d}k {mean[0]:12.4f} {table[:, 1].max():10.4f} {mean[2]:9.4f} {mean[3]:9.4f} "
          f"{table[:, 3].min():7.4f} {mean[4]:9.4f} {share.mean():9.4f} {share.min():7.4f} "
          f"{int(table[:, 5].sum()):10d} {statistics.median(times):7.1f} {max(times):7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    print(f"{options.samples} sequences, {options.ranks} data-parallel ranks, {options.seeds} seeds")
    print("lengths  bestfit/bound  plan/bfit  best-fit      plan  (min)     bound  plan/bnd   (min) violations"
          "      ms   (max)")
    for kind, cap in (("conv", 8192), ("tail", 32768), ("tail", 65536)):
        measure(kind, cap, options)


if __name__ == "__main__":
    main()
