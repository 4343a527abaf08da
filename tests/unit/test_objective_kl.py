"""KL estimators: values by hand, gradients by finite differences, and the expectations that their docstring claims."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.objective.kl import kl_estimate

# A policy and a reference over three tokens. KL(p||q) = .5 ln 2 + .3 ln 1 + .2 ln(.2/.45)
P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.25, 0.3, 0.45], dtype=torch.float64)


def kl(p, q):
    return (p * (p / q).log()).sum()


def test_values_by_hand():
    # p = 1/2, q = 1/4: r = ln(1/2). k1 = ln 2; k2 = (ln 2)^2 / 2; k3 = 1/2 - 1 + ln 2.
    # p = 1/4, q = 1/2: r = ln 2.    k1 = -ln 2; k2 = (ln 2)^2 / 2; k3 = 2 - 1 - ln 2.
    p, q = torch.tensor([0.5, 0.25, 0.3]).double().log(), torch.tensor([0.25, 0.5, 0.3]).double().log()
    ln2 = math.log(2)
    for estimator, want in {"k1": (ln2, -ln2, 0), "k2": (ln2**2 / 2, ln2**2 / 2, 0),
                            "k3": (ln2 - 0.5, 1 - ln2, 0)}.items():
        torch.testing.assert_close(kl_estimate(p, q, estimator), torch.tensor(want, dtype=torch.float64))


def test_k3_keeps_its_precision_near_equality():
    # r = 1e-3 in fp32: exp(r) - 1 - r = r^2/2 + r^3/6 = 5.00167e-7, while exp(r) - 1 alone rounds at 6e-8.
    got = kl_estimate(torch.zeros(1), torch.tensor([1e-3]), "k3").item()
    assert got == pytest.approx(5.00167e-7, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_by_finite_differences(estimator):
    logprobs_t = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref_t = torch.tensor([-1.0, -0.3, -1.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_t, estimator), (logprobs_t,))


@pytest.mark.parametrize("estimator, unbiased", [("k1", True), ("k2", False), ("k3", True)])
def test_expected_values(estimator, unbiased):
    mean = (P * kl_estimate(P.log(), Q.log(), estimator)).sum()
    assert torch.isclose(mean, kl(P, Q), atol=1e-12) == unbiased


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradients(estimator):
    """Sum over tokens of p(token) * gradient of the estimator: 0 for k1, of KL(p||q) for k2, of KL(q||p) for k3."""
    logits = P.log().clone().requires_grad_()

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    def policy():
        return torch.log_softmax(logits, 0)

    want = {"k1": torch.zeros_like(P), "k2": gradient(kl(policy().exp(), Q)), "k3": gradient(kl(Q, policy().exp()))}
    got = gradient((P * kl_estimate(policy(), Q.log(), estimator)).sum())  # P: sampling, which has no gradient
    torch.testing.assert_close(got, want[estimator], rtol=1e-12, atol=1e-12)
