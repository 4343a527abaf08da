"""Where the published bubble formulas stop holding: simulated against formula, as the tables of docs/schedules.md.

    python tests/bench/bubbles.py

The bubble is the makespan minus the work of the rank with the least work, in units of a forward of 1/P of the model.
Settings: P = 2, 4, 8, 16 and M = 2P, 3P, 4P (for interleaved v = 2).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]

from formulas import BUBBLE  # noqa: E402

from megarl.pipeline.compare import predicted  # noqa: E402

SETTINGS = [(ranks, ranks * per_rank) for ranks in (2, 4, 8, 16) for per_rank in (2, 3, 4)]
COSTS = [  # title, (F, I, W), hidden share, hop
    ("all 1", (1.0, 1.0, 1.0), 0.0, 0.0),
    ("W = 0.5", (1.0, 1.0, 0.5), 0.0, 0.0),
    ("W = 0.2", (1.0, 1.0, 0.2), 0.0, 0.0),
    ("W = 1.2", (1.0, 1.0, 1.2), 0.0, 0.0),
    ("I = 0.8", (1.0, 0.8, 1.0), 0.0, 0.0),
    ("I = 1.2", (1.0, 1.2, 1.0), 0.0, 0.0),
    ("I = 1.2, W = 0.8", (1.0, 1.2, 0.8), 0.0, 0.0),
    ("I = 0.8, W = 1.2", (1.0, 0.8, 1.2), 0.0, 0.0),
    ("pairs hide 30 % of F and I", (1.0, 1.0, 1.0), 0.3, 0.0),
    ("W = 0.5, pairs hide 45 %", (1.0, 1.0, 0.5), 0.45, 0.0),
    ("hop = 0.1", (1.0, 1.0, 1.0), 0.0, 0.1),
]


def error(name: str, ratio: tuple[float, float, float], hidden: float, hop: float) -> tuple[float, float]:
    """The least and the largest of simulated minus published bubble over all settings."""
    forward, input_grad, weight_grad = ratio
    pair = sum(ratio) - 2 * hidden * min(forward, input_grad)
    found = []
    for ranks, microbatches in SETTINGS:
        line, _ = predicted(name, ranks, 2, [1.0] * microbatches, ratio, hop, hidden)
        bubble = BUBBLE[name](ranks, 2, forward, input_grad + weight_grad, weight_grad, pair)
        found.append(line.makespan - min(line.busy) - bubble)
    return min(found), max(found)


def main() -> None:
    print("| F = I = W = 1, but | " + " | ".join(BUBBLE) + " |")
    print("|---|" + "---|" * len(BUBBLE))
    for title, *costs in COSTS:
        cells = []
        for name in BUBBLE:
            low, high = error(name, *costs)
            exact = max(abs(low), abs(high)) < 1e-9
            cells.append("exact" if exact else f"{low:+.1f}" if high - low < 0.05 else f"{low:+.1f} to {high:+.1f}")
        print(f"| {title} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
