"""Imported once by the server of `forks`: what its processes would each import."""

from __future__ import annotations

import warnings

import torch

from megarl.cluster import device

torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are not installed; they would land in some test's output
    device.prepare("cpu")
    import megarl.checkpoint.hf_export
    import megarl.rollout.supervisor
    import megarl.update.policy  # noqa: F401
