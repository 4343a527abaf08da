"""Estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL divergence").

With r = log-prob under the reference - log-prob under the policy, per token:

    k1 = -r              unbiased value; as a loss its expected gradient is zero (the score function's mean)
    k2 = r^2 / 2         biased value; as a loss its expected gradient is that of KL(policy || reference)
    k3 = exp(r) - 1 - r  unbiased value, never negative; as a loss its expected gradient is that of
                         KL(reference || policy)

(The gradients are for samples from the present policy.)
"""

from __future__ import annotations

from typing import Literal

import torch


def kl_estimate(logprobs_t: torch.Tensor, ref_t: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """The estimator at each token.

    Args:
        logprobs_t, ref_t: log-probs of the sampled tokens under the policy and the reference, same shape.
        estimator: which one.
    """
    log_ratio = ref_t - logprobs_t
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.expm1() - log_ratio
