"""Old samples: the decoupled objective against the naive one, on a softmax policy small enough to do by hand.

One state, three actions, probabilities that are fractions. The engine sampled with weights that are 0, 1 and 4 versions
older than the experience's; the trainer has since made half an update. Gradients are those of the logits: of token a
with policy p it is d log p(a) / d logits = onehot(a) - p.
"""

from __future__ import annotations

import math

import pytest
import torch

from megarl.config.schema import CorrectionConfig, ObjectiveConfig
from megarl.errors import UserMistake
from megarl.objective.advantages import token_weights
from megarl.objective.policy import BY_LAG, policy_loss
from megarl.objective.recipes import resolve

BEHAVIOUR = {0: (1 / 2, 1 / 4, 1 / 4), 1: (12 / 25, 1 / 4, 27 / 100), 4: (1 / 4, 1 / 4, 1 / 2)}  # by lag
PROXIMAL, CURRENT = BEHAVIOUR[0], (11 / 20, 1 / 5, 1 / 4)
SAMPLES = ((0, 1.0), (2, -1.0))  # (action, advantage): ratios current/proximal 1.1 and 1, inside the clip of .2
UNBOUNDED = CorrectionConfig(kind="truncated", high=1e9)
NONE = CorrectionConfig(kind="none")


def objective(proximal, correction, algorithm="grpo", **fields):
    return resolve(ObjectiveConfig(algorithm=algorithm, proximal=proximal, correction=correction, **fields), 8)


def gradient_by_megarl(one, samples, behaviours):
    """Of the logits, for one sequence of tokens, each sampled by its own behaviour policy; weights 1/len each."""
    logits = torch.tensor(CURRENT, dtype=torch.float64).log().requires_grad_()
    actions = [action for action, _ in samples]
    loss, _ = policy_loss(
        logits.log_softmax(0)[actions], torch.tensor([PROXIMAL[a] for a in actions], dtype=torch.float64).log(),
        torch.tensor([advantage for _, advantage in samples], dtype=torch.float64),
        torch.full((len(samples),), 1 / len(samples), dtype=torch.float64), torch.ones(len(samples), dtype=torch.bool),
        torch.zeros(len(samples), dtype=torch.int64), 1, one,
        engine_t=torch.tensor([p[a] for p, a in zip(behaviours, actions, strict=True)], dtype=torch.float64).log())
    loss.backward()
    return logits.grad.tolist()


def gradient_by_hand(factors, samples=SAMPLES):
    """-(1/len) sum of factor * advantage * (onehot(a) - current), where `factors` is what stands before the score."""
    total = [0.0, 0.0, 0.0]
    for factor, (action, advantage) in zip(factors, samples, strict=True):
        for k in range(3):
            total[k] -= factor * advantage * ((k == action) - CURRENT[k]) / len(samples)
    return total


def loss_by_fractions(logits, proximal, behaviour):
    """The step's loss from the papers' formulas in plain Python, for finite differences."""
    norm = sum(math.exp(x) for x in logits)
    total = 0.0
    for action, advantage in SAMPLES:
        current = math.exp(logits[action]) / norm
        if proximal == "old":  # Hilton et al. 2022, eq. 3
            ratio, weight = current / PROXIMAL[action], PROXIMAL[action] / behaviour[action]
        else:
            ratio, weight = current / behaviour[action], 1.0
        total -= weight * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) / len(SAMPLES)
    return total


# What stands before the score: current/behaviour where the clip is not at work, else 0. The clip of the decoupled form
# looks at current/proximal (1.1 and 1): never at work here. That of the naive form looks at current/behaviour:
#   lag 0   .55/.5 = 1.1,      .25/.25 = 1            as decoupled
#   lag 1   .55/.48 = 1.1458,  .25/.27 = .926         as decoupled
#   lag 4   .55/.25 = 2.2,     .25/.5  = .5           both outside [.8, 1.2], both on the side that is cut
FACTORS = {("old", 0): (1.1, 1.0), ("old", 1): (55 / 48, 25 / 27), ("old", 4): (2.2, 0.5),
           ("behaviour", 0): (1.1, 1.0), ("behaviour", 1): (55 / 48, 25 / 27), ("behaviour", 4): (0.0, 0.0)}


@pytest.mark.parametrize("proximal, lag", FACTORS)
def test_gradient_by_hand_and_by_finite_differences(proximal, lag):
    one = objective(proximal, UNBOUNDED if proximal == "old" else NONE)
    got = gradient_by_megarl(one, SAMPLES, [BEHAVIOUR[lag]] * 2)
    assert got == pytest.approx(gradient_by_hand(FACTORS[proximal, lag]), rel=1e-12, abs=1e-15)
    logits, step = [math.log(p) for p in CURRENT], 1e-6
    for k in range(3):
        up, down = ([x + sign * step * (i == k) for i, x in enumerate(logits)] for sign in (1, -1))
        slope = (loss_by_fractions(up, proximal, BEHAVIOUR[lag]) - loss_by_fractions(down, proximal, BEHAVIOUR[lag]))
        assert got[k] == pytest.approx(slope / (2 * step), abs=1e-9)


@pytest.mark.parametrize("correction, factors", [
    # weights old/engine at lag 4: 2 and 1/2
    (CorrectionConfig(kind="truncated", high=1.5), (1.5 * 1.1, 0.5)),
    (CorrectionConfig(kind="masked", low=0.6, high=5.0), (2.2, 0)),
    (CorrectionConfig(kind="masked", low=0.1, high=1.5), (0, 0.5)),
    (CorrectionConfig(kind="truncated", level="sequence", high=5.0), (1.1, 1.0)),  # product 1
    (CorrectionConfig(kind="none", reject="token", reject_low=0.6, reject_high=5.0), (1.1, 0)),
    (CorrectionConfig(kind="truncated", high=1.5, reject="token", reject_low=0.1, reject_high=1.9), (0, 0.5)),
    (CorrectionConfig(kind="truncated", high=1.5, reject="geometric", reject_low=0.99, reject_high=1.01),
     (1.65, 0.5))])
def test_bounds_at_lag_4(correction, factors):
    """A masked token leaves the numerator; the weight 1/2 of the other, which is the divisor, stays."""
    got = gradient_by_megarl(objective("old", correction), SAMPLES, [BEHAVIOUR[4]] * 2)
    assert got == pytest.approx(gradient_by_hand(factors), rel=1e-12, abs=1e-15)


def test_naive_ratio_with_rejection():
    """Rejection looks at old/engine also where the ratio is current/engine; the clip is out of the way."""
    one = objective("behaviour", CorrectionConfig(kind="none", reject="token", reject_low=0.6, reject_high=5.0),
                    clip_low=1.0, clip_high=10.0)
    got = gradient_by_megarl(one, SAMPLES, [BEHAVIOUR[4]] * 2)
    assert got == pytest.approx(gradient_by_hand((2.2, 0)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("lags", [(0, 0), (4, 4), (4, 0), (1, 4)])
def test_sequence_ratio_of_a_response_of_several_versions(lags):
    """GSPO: the ratio is the geometric mean of current/proximal over the sequence; with the geometric weight in front
    the product is that of current/behaviour, token by token of its own version, so away from the clip both forms agree.
    """
    samples, behaviours = ((0, 2.0), (2, 2.0)), [BEHAVIOUR[lag] for lag in lags]
    wide = dict(algorithm="gspo", clip_low=1.0, clip_high=10.0)
    mean = math.sqrt(math.prod(CURRENT[a] / p[a] for (a, _), p in zip(samples, behaviours, strict=True)))
    # d mean / d logits = mean * mean of the scores, and every token of the sequence has the same surrogate
    want = gradient_by_hand((mean, mean), samples)
    geometric = CorrectionConfig(kind="masked", level="geometric", low=0.0, high=1e9)
    decoupled = gradient_by_megarl(objective("old", geometric, **wide), samples, behaviours)
    naive = gradient_by_megarl(objective("behaviour", NONE, **wide), samples, behaviours)
    assert decoupled == pytest.approx(want, rel=1e-12) and naive == pytest.approx(want, rel=1e-12)


def test_sequence_ratio_with_the_weight_of_the_sequence():
    """The product of the weights (lags 4 and 1: 2 * 25/27) in front of GSPO's ratio sqrt(1.1)."""
    samples = ((0, 2.0), (2, 2.0))
    one = objective("old", CorrectionConfig(kind="truncated", level="sequence", high=1e9), algorithm="gspo",
                    clip_low=1.0, clip_high=10.0)
    got = gradient_by_megarl(one, samples, [BEHAVIOUR[4], BEHAVIOUR[1]])
    factor = 2 * 25 / 27 * math.sqrt(1.1)
    assert got == pytest.approx(gradient_by_hand((factor, factor), samples), rel=1e-12)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo"])
def test_masks_do_not_touch_the_divisor(algorithm):
    """Two sequences of 3 and 1 tokens, all ratios and advantages 1; the second token is masked: the loss lacks it."""
    one = objective("old", CorrectionConfig(kind="masked", low=0.5, high=2.0), algorithm)
    weights = token_weights(torch.tensor([3, 1]), one)[[0, 0, 0, 1]]
    old_t = torch.zeros(4, dtype=torch.float64)
    loss, _ = policy_loss(old_t.clone().requires_grad_(), old_t, torch.ones(4, dtype=torch.float64), weights,
                          torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 0, 1]), 2, one,
                          engine_t=torch.tensor([0.0, -3.0, 0.0, 0.0], dtype=torch.float64))
    by_hand = {"grpo": -(2 / 3 + 1) / 2, "dapo": -3 / 4, "dr_grpo": -3 / 16}
    assert loss.item() == pytest.approx(by_hand[algorithm], rel=1e-12)


def test_a_nan_of_the_engine_is_neither_rejected_nor_kept_with_weight_1():
    one = objective("old", CorrectionConfig(kind="none", reject="token"))
    old_t = torch.zeros(2, dtype=torch.float64)
    loss, _ = policy_loss(old_t, old_t, old_t + 1, old_t + 1, old_t == 0, old_t.long(), 1, one,
                          engine_t=torch.tensor([0.0, math.nan], dtype=torch.float64))
    assert math.isnan(loss)


def test_statistics_by_lag():
    """Tokens of lags 0, 1, 1 and 7 (counted with the last of 3), and one that is not trained on."""
    one = objective("old", CorrectionConfig(kind="truncated", high=2.0))
    ratio, weight = (1.5, 1.0, 0.5, 1.0, 9.0), (1.0, 4.0, 1.5, 0.25, math.nan)
    old_t = torch.full((5,), -1.0, dtype=torch.float64)
    _, stats = policy_loss(
        old_t + torch.tensor(ratio, dtype=torch.float64).log(), old_t,
        torch.tensor([1.0, 1, -1, 1, 1], dtype=torch.float64), old_t + 2,
        torch.tensor([True, True, True, True, False]), torch.zeros(5, dtype=torch.int64), 1, one,
        engine_t=old_t - torch.tensor(weight, dtype=torch.float64).log(),
        lag_t=torch.tensor([0.0, 1, 1, 7, math.nan]), lags=3)
    got = dict(zip(BY_LAG, stats["by_lag"].tolist(), strict=True))
    assert got["tokens"] == [1, 2, 1] and got["is_weight"] == pytest.approx([1, 3.5, 0.25])
    assert got["is_cut"] == [0, 1, 0] and got["clipped_high"] == [1, 0, 0] and got["clipped_low"] == [0, 1, 0]


@pytest.mark.parametrize("settings, where", [
    (dict(proximal="behaviour"), "objective.correction.kind"),
    (dict(correction=CorrectionConfig(reject="geometric", reject_low=1.1)), "objective.correction.reject_low"),
    (dict(correction=CorrectionConfig(kind="none", reject="token", reject_high=0.9)),
     "objective.correction.reject_high")])
def test_contradictions(settings, where):
    with pytest.raises(UserMistake) as caught:
        resolve(ObjectiveConfig(**settings), 8)
    assert caught.value.where == where and caught.value.remedy


def test_the_naive_form_needs_the_engine_and_says_so():
    one = objective("behaviour", CorrectionConfig(kind="none", reject="sequence"))
    assert one.needs_engine and one.needs_sequences and "naive" in one.describe()
    assert "rejection by sequence 0.5..2" in one.describe()
    assert not objective("old", NONE).needs_engine
