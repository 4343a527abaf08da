"""What a person watching the run sees: the banner at the start, one line per step."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from megarl.cluster import device
from megarl.versions import apex

_COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("policy/kl", "kl", "{:.1e}"),
    ("policy/entropy", "ent", "{:.2f}"),
    ("rollout/response_tokens", "len", "{:.0f}"),
    ("rollout/truncated", "cut", "{:.0%}"),
    ("policy/clip_fraction", "clip", "{:.0%}"),
    ("optim/grad_norm", "|g|", "{:.2f}"),
    ("engine/gap_mean", "gap", "{:.1e}"),
    ("speed/tokens_per_second", "tok/s", "{:.0f}"),
)


def versions() -> dict[str, str]:
    """Versions that matter to a run, as strings; "none" for what is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformers", "transformer-engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    found["apex"] = apex()
    return {**found, **device.accelerator_versions()}


def banner(lines: dict[str, str]) -> str:
    """The start banner: a name and a text per line, aligned, the versions last."""
    rows = {"megarl": importlib.import_module("megarl").__version__, **lines,
            "versions": ", ".join(f"{name} {text}" for name, text in versions().items())}
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {text}" for name, text in rows.items())


def step_line(step: int, steps: int, values: dict[str, float], reference: bool) -> str:
    """One line for a finished step: a bar, the numbers to watch, seconds per phase.

    Args:
        step: number of the finished step, from 1.
        steps: of the run.
        values: the step's metrics, as written to metrics.jsonl.
        reference: whether there is a reference model to have a KL to.
    """
    filled = round(12 * step / steps)
    parts = [f"step {step:>{len(str(steps))}}/{steps} {'━' * filled}{'─' * (12 - filled)}"]
    for name, label, pattern in _COLUMNS:
        if name in values and (name != "policy/kl" or reference):
            parts.append(f"{label} {pattern.format(values[name])}")
        if name == "optim/grad_norm" and values.get("rollout/signal") == 0:
            parts.append("no signal")  # in no group do rewards differ
    seconds = [f"{name.removeprefix('seconds/')} {value:.1f}" for name, value in values.items()
               if name.startswith("seconds/") and value >= 0.05]
    return " ".join(parts) + ("  [s: " + " ".join(seconds) + "]" if seconds else "")
