"""Learning curves with old samples: the decoupled objective against the naive one, on the sort task.

    python tests/bench/lag_curves.py [--out runs/lag-curves] [--lag 4] [--seeds 3] [--steps 60]

A tiny dense Qwen3 learns to sort with GRPO, one trainer and one embedded engine, at `rollout.max_lag` 0 and --lag:
the engine is so much faster than the trainer that nearly every sample is --lag versions old when it is trained on.
`decoupled` is the default objective (ratio to the old log-probs, truncated weight old/engine); `naive` has
`objective.proximal: behaviour` and no weight. Everything else is equal, the seeds too (of data order and sampling).

Writes one picture, curves.png (reward of sampled answers and the fraction of tokens that the clip took out, by step;
thin: seeds, thick: their mean), and prints a table. Runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

FORMS = {"decoupled": [], "naive": ["objective.proximal=behaviour", "objective.correction.kind=none"]}
COLOURS = {"lag 0": "#555555", "decoupled": "#1f6fb4", "naive": "#d9541e"}
LAST = 10  # steps that the table's means are over


def run(folder: Path, task: Path, steps: int, seed: int, lag: int, form: list[str], lr: float) -> list[dict]:
    """Train, if it was not done before; the records of metrics.jsonl."""
    if not (folder / "done").exists():
        command = ["bash", str(ROOT / "launch/torchrun.sh"), str(ROOT / "configs/tiny/grpo_dense.yaml"),
                   f"run.dir={folder}", f"run.steps={steps}", f"run.seed={seed}", "checkpoint.resume=false",
                   "checkpoint.every=0", "checkpoint.export=false", "cluster.trainers=1", "parallel.tensor=1",
                   f"model.path={task}/model", f"data.sources.0.path={task}/train.jsonl", "data.prompts_per_step=16",
                   f"eval.sets.0.path={task}/heldout.jsonl", "eval.every=0", "eval.before_start=false",
                   f"rollout.max_lag={lag}", f"optim.lr={lr}", "observe.tensorboard=false", *form]
        done = subprocess.run(command, capture_output=True, text=True,
                              env={**os.environ, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{folder} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        (folder / "done").touch()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(curves: dict[str, list[list[dict]]], path: Path, title: str) -> None:
    """Reward and clip fraction against step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, name, label in zip(both, ("reward/mean", "policy/clip_fraction"),
                                 ("mean reward of sampled answers", "fraction of tokens clipped"), strict=True):
        for form, runs in curves.items():
            rows = [[record[name] for record in one] for one in runs]
            steps = [record["step"] for record in runs[0]]
            for row in rows:
                axes.plot(steps, row, color=COLOURS[form], linewidth=0.7, alpha=0.45)
            axes.plot(steps, [statistics.fmean(column) for column in zip(*rows, strict=True)], color=COLOURS[form],
                      linewidth=2.2, label=form)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    both[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    """Run what is missing, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/lag-curves")
    parser.add_argument("--task", type=Path, help="made if it is not there; default: OUT/task")
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    task = options.task or options.out / "task"
    subprocess.run([sys.executable, str(ROOT / "tools/make_sort_task.py"), "--out", str(task), "--experts", "0",
                    "--layers", "2"], check=True)
    curves: dict[str, list[list[dict]]] = {}
    kinds = {"lag 0": (0, []), **{form: (options.lag, keys) for form, keys in FORMS.items()}}
    print("| objective | max_lag | reward of the last 10 steps, by seed | mean | mean lag | clipped | KL to old | "
          "KL to the engine |")
    print("|---|---|---|---|---|---|---|---|")
    for form, (lag, keys) in kinds.items():
        runs = [run(options.out / f"{form.replace(' ', '')}-{seed}", task, options.steps, seed, lag, keys, options.lr)
                for seed in range(options.seeds)]
        curves[form] = runs

        def mean(name: str, runs: list[list[dict]] = runs) -> float:
            return statistics.fmean(record.get(name, 0.0) for one in runs for record in one[options.lag:])

        last = [statistics.fmean(record["reward/mean"] for record in one[-LAST:]) for one in runs]
        print(f"| {form} | {lag} | {', '.join(f'{value:.3f}' for value in last)} | {statistics.fmean(last):.3f} | "
              f"{mean('lag/mean'):.2f} | {mean('policy/clip_fraction'):.4f} | {mean('policy/kl_old'):.2g} | "
              f"{mean('engine/kl'):.2g} |", flush=True)
    draw(curves, options.out / "curves.png", f"Sort task, GRPO, {options.seeds} seeds: decoupled and naive at max_lag "
         f"{options.lag}, and max_lag 0")


if __name__ == "__main__":
    main()
