"""The published bubble and memory of each schedule, written down apart from the simulator.

Seconds and activations are per micro-batch of 1/P of the model: F, I, W; B = I + W; FB is a pair's time. The bubble is
the makespan minus the work of the rank with the least work.

GPipe: Huang et al. 2019. 1F1B, interleaved: Narayanan et al. 2021. ZB-H1: Qi et al. 2024, "Zero Bubble Pipeline
Parallelism". ZB-V: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": no bubble inside a rank's own span
if F = I = W; ranks start half a stage apart. DualPipe: DeepSeek-V3 report; DualPipeV: README of its repository.
"""

from __future__ import annotations

BUBBLE = {
    "gpipe": lambda P, v, F, B, W, FB: (P - 1) * (F + B),
    "1f1b": lambda P, v, F, B, W, FB: (P - 1) * (F + B),
    "interleaved": lambda P, v, F, B, W, FB: (P - 1) * (F + B) / v,
    "zb-h1": lambda P, v, F, B, W, FB: (P - 1) * (F + B - 2 * W),
    "zb-v": lambda P, v, F, B, W, FB: (P - 1) * F / 2,
    "dualpipev": lambda P, v, F, B, W, FB: (P - 1) * (FB + B - 3 * W) / 2,
    "dualpipe": lambda P, v, F, B, W, FB: (P / 2 - 1) * (FB + B - 3 * W),
}

PEAK = {  # micro-batches' activations of 1/P of the model
    "gpipe": lambda P, v, M: M,
    "1f1b": lambda P, v, M: P,
    "interleaved": lambda P, v, M: P + (P - 1) / v,
    "zb-h1": lambda P, v, M: P,
    "zb-v": lambda P, v, M: P,
    "dualpipev": lambda P, v, M: P + 1 / 2,
    "dualpipe": lambda P, v, M: P + 1,
}

CHUNKS = {"interleaved": (2, 4), "zb-v": (2,), "dualpipev": (2,), "dualpipe": (2,)}


def settings(name: str) -> list[tuple[int, int, int]]:
    """(P, M, v) to which the formula of a schedule applies."""
    found = []
    for ranks in (2, 3, 4, 6, 8, 16):
        for microbatches in (2 * ranks, 3 * ranks, 4 * ranks, 2 * ranks + 3, 3 * ranks - 1):
            even = ranks % 2 == 0 and microbatches % 2 == 0
            if not ((name == "interleaved" and microbatches % ranks) or (name == "dualpipe" and not even)):
                found += [(ranks, microbatches, chunks) for chunks in CHUNKS.get(name, (1,))]
    return [setting for setting in found if setting[1] >= 2 * setting[0]]
