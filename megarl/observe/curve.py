"""The reward curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from megarl.observe.metrics import read_lines


def draw_reward(run_dir: Path) -> Path | None:
    """Draw reward against step from metrics.jsonl: training, and every held-out set; returns the PNG's path.

    None where nothing was recorded yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_lines(run_dir / "metrics.jsonl")
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None and (name == "reward/mean" or name.startswith("eval/") and name.endswith("/reward")):
                curves.setdefault(name, []).append((record["step"], value))
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in curves.items():
        held_out = name.startswith("eval/")
        label = f"evaluation: {name.split('/')[1]}" if held_out else "training samples"
        axes.plot(*zip(*points, strict=True), label=label, linewidth=2 if held_out else 1, alpha=1 if held_out else 0.6,
                  marker="o" if held_out else None, markersize=4)
    axes.set(xlabel="step", ylabel="mean reward", title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
