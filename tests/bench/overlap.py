"""Overlap bench: steps per hour by max_lag, simulated with lengths of real requests (`rollout.overlap`).

    python tests/bench/overlap.py [--groups 128] [--samples 8] [--slots 256] [--steps 300] [--svg overlap.svg]

Lengths: generated_tokens of azure_conv (tests/bench/data; mean 211, at most 1,000), drawn at random into groups. A
token takes 20 ms in its slot. `rollout:train` is the time to sample a step's tokens with every slot busy over the time
to train them; publishing takes 2 % of the former.

Columns: steps per hour and over those at max_lag 0; the bound that no order of work beats (`Setting.bound`), that of
orders that do not know lengths beforehand and drop nothing (blind: `Setting.blind_bound`), and the shares of them that
are reached; the fraction of slots that are busy; the mean lag of groups; Kolmogorov-Smirnov distance of
the lengths that were trained on to those that were issued, the largest of all moments (after each step, from the tenth
on); groups dropped; and of the longest hundredth of all samples the share that was trained on. The last rows are what
megarl does not do: a step takes what finished first, and what became too old is dropped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from megarl.rollout.admission import Choice, choose  # noqa: E402
from megarl.rollout.overlap import Overlap, Setting, ks_distance, simulate  # noqa: E402

TOKEN_S, PUBLISH, SKIP = 0.02, 0.02, 10


def first_come(pending, need: int, step: int, max_lag: int) -> Choice:
    """A step takes what finished first."""
    done = sorted((one for one in pending if one.finished is not None), key=lambda one: one.finished)
    return Choice(sorted(one.number for one in done[:need])) if len(done) >= need else Choice(None, "samples")


def generated_tokens() -> np.ndarray:
    """Of real chat requests."""
    return np.loadtxt(ROOT / "tests/bench/data/azure_conv.csv", delimiter=",", skiprows=1, dtype=np.int64)[:, 1]


def busy_share(seen: Overlap) -> float:
    """The fraction of the slots' time that is used, between the first steps and the last."""
    start, end = seen.ended[SKIP], seen.ended[-1 - SKIP]
    times, busy = np.array(seen.busy).T
    times, busy = np.append(times, end), np.append(busy, 0)
    spans = np.diff(np.clip(times, start, end))
    return float((spans * busy[:-1]).sum()) / (end - start) / seen.setting.slots


def worst_distance(seen: Overlap, lengths_gn: np.ndarray) -> float:
    """The largest distance of what was trained on so far from what was issued so far."""
    moments = range(SKIP, len(seen.taken) + 1, 5)
    return max(ks_distance(lengths_gn[np.concatenate(seen.taken[:k]) % len(lengths_gn)].ravel(),
                           lengths_gn[np.arange(seen.issued[k - 1]) % len(lengths_gn)].ravel()) for k in moments)


def long_share(seen: Overlap, lengths_gn: np.ndarray) -> float:
    """Of the longest hundredth of the samples of groups taken or dropped, the share in groups that were taken."""
    taken = lengths_gn[np.concatenate(seen.taken) % len(lengths_gn)].ravel()
    dropped = lengths_gn[np.array(seen.dropped, np.int64) % len(lengths_gn)].ravel()
    limit = np.quantile(lengths_gn, 0.99)
    return float((taken > limit).sum() / ((taken > limit).sum() + (dropped > limit).sum()))


def line(name: str, seen: Overlap, lengths_gn: np.ndarray, base: float) -> str:
    """One line of the table."""
    rate, setting = seen.steps_per_hour(SKIP), seen.setting
    inner = lengths_gn[setting.groups * SKIP:setting.groups * (setting.steps - SKIP)]
    bound, blind = setting.bound(inner), setting.blind_bound(inner)
    return (f"| {name} | {rate:.1f} | {rate / base:.2f} | {bound:.1f} | {100 * rate / bound:.0f} % | "
            f"{blind:.1f} | {100 * rate / blind:.0f} % | "
            f"{100 * busy_share(seen):.0f} % | {np.mean(list(seen.lag.values())):.2f} | "
            f"{worst_distance(seen, lengths_gn):.4f} | {len(seen.dropped)} | "
            f"{100 * long_share(seen, lengths_gn):.0f} % |")


def draw(rows: list[tuple[str, Overlap]], seconds: float) -> str:
    """Busy slots (area) and training (bars) of each run against time, from the same step on, as SVG."""
    width, height, left, top = 900, 62, 150, 34
    total = top + height * len(rows) + 24
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {total}" '
           'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="20">busy slots of the engines (blue) and training (orange; dark: weights are '
           'swapped)</text>']
    for number, (name, seen) in enumerate(rows):
        start, y = float(seen.ended[SKIP]), top + height * number
        scale, full = width / seconds, height - 24

        def x(time: float, start: float = start, scale: float = scale) -> float:
            return left + float(np.clip(time - start, 0, seconds)) * scale

        columns: dict[int, int] = {}  # the last value of each pixel column
        for time, busy in seen.busy:
            columns[round(x(time))] = busy
        columns[left + width] = 0
        points, level, before = [f"{left},{y + full}"], y + full, None
        for column, busy in sorted(columns.items()):
            if busy != before:
                points.append(f"{column},{level:.1f}")
                level, before = y + full - full * busy / seen.setting.slots, busy
                points.append(f"{column},{level:.1f}")
        points.append(f"{left + width},{y + full}")
        out.append(f'<text x="8" y="{y + 24}">{name}</text><polygon points="{" ".join(points)}" fill="#7aa6d8"/>')
        for took, ended in zip(seen.took, seen.ended, strict=True):
            if ended > start and took < start + seconds:
                swap = ended - seen.setting.publish_s
                out.append(f'<rect x="{x(took):.1f}" y="{y + full + 2}" width="{x(swap) - x(took):.1f}" height="9" '
                           f'fill="#e8a33d"/><rect x="{x(swap):.1f}" y="{y + full + 2}" '
                           f'width="{max(x(ended) - x(swap), 0.5):.1f}" height="9" fill="#7a4a00"/>')
    out.append(f'<text x="{left}" y="{total - 8}">0 s</text><text x="{left + width}" y="{total - 8}" '
               f'text-anchor="end">{seconds:.0f} s</text></svg>')
    return "\n".join(out)


def main() -> None:
    """Print the table; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    lengths = np.random.default_rng(0).choice(generated_tokens(), (options.groups * options.steps, options.samples))
    sampling = lengths.sum() / options.steps * TOKEN_S / options.slots
    print(f"{options.groups} prompts x {options.samples} samples a step, {options.slots} slots, {options.steps} steps; "
          f"sampling a step takes {sampling:.1f} s with every slot busy\n")
    print("| rollout:train, max_lag | steps/h | over lag 0 | bound | reached | blind | reached | busy | mean lag | "
          "KS | dropped | long ones trained |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    drawn: list[tuple[str, Overlap]] = []
    for ratio in (4, 1):
        def run(lag: int, ahead: float | None = None, rule=choose, ratio: int = ratio) -> Overlap:
            return simulate(Setting(options.slots, TOKEN_S, options.groups, sampling / ratio, PUBLISH * sampling, lag,
                                    options.steps, ahead), lengths, rule)

        base = run(0).steps_per_hour(SKIP)
        for lag in (0, 1, 2):
            seen = run(lag)
            drawn.append((f"{ratio}:1, max_lag {lag}", seen))
            print(line(f"{ratio}:1, {lag}", seen, lengths, base))
        print(line(f"{ratio}:1, 2, rollout.ahead 1", run(2, 1.0), lengths, base))
        for lag in (1, 2):
            print(line(f"{ratio}:1, {lag}, first come", run(lag, rule=first_come), lengths, base))
    if options.svg:
        options.svg.write_text(draw(drawn, 10 * sampling), encoding="utf-8")


if __name__ == "__main__":
    main()
