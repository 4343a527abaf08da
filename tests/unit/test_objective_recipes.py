"""Recipes: the published values, overrides, what describe() tells, and contradictions."""

from __future__ import annotations

import pytest

from megarl.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from megarl.errors import UserMistake
from megarl.objective.recipes import resolve

# (ratio, clip low, clip high, aggregation, std, dynamic sampling), from the papers
PUBLISHED = {
    "grpo": ("token", 0.2, 0.2, "sequence_mean", True, False),  # arXiv 2402.03300
    "gspo": ("sequence", 3e-4, 4e-4, "sequence_mean", True, False),  # arXiv 2507.18071, section 5.1
    "gspo_token": ("sequence_token", 3e-4, 4e-4, "sequence_mean", True, False),
    "dapo": ("token", 0.2, 0.28, "token_mean", True, True),  # arXiv 2503.14476, section 4.1
    "dr_grpo": ("token", 0.2, 0.2, "constant", False, False),  # arXiv 2503.20783
}


@pytest.mark.parametrize("algorithm", PUBLISHED)
def test_published_values(algorithm):
    one = resolve(ObjectiveConfig(algorithm=algorithm), 64)
    assert (one.ratio, one.clip_low, one.clip_high, one.aggregation, one.normalize_std,
            one.dynamic_sampling) == PUBLISHED[algorithm]
    assert (one.std_ddof, one.std_eps, one.kl.estimator, one.kl.place) == (1, 1e-6, "k3", "loss")
    assert not one.needs_reference and not one.kl_in_loss and not one.kl_in_reward


def test_given_fields_win():
    one = resolve(ObjectiveConfig(algorithm="dapo", clip_high=0.0, normalize_std=False, dynamic_sampling=False), 64)
    assert (one.clip_low, one.clip_high, one.normalize_std, one.dynamic_sampling) == (0.2, 0.0, False, False)


def test_describe_tells_every_choice():
    grpo = resolve(ObjectiveConfig(algorithm="grpo", kl=KLConfig(coefficient=0.04), std_ddof=0, std_eps=1e-4), 64)
    for part in ("token ratio", "clip 0.2/0.2", "mean over tokens, then sequences", "std (ddof 0, eps 0.0001)",
                 "KL 0.04 k3 in the loss", "truncated importance sampling by token <= 2"):
        assert part in grpo.describe()
    other = resolve(ObjectiveConfig(
        algorithm="dr_grpo", entropy_bonus=0.01, mask_truncated=True, overlong_buffer=16, dynamic_sampling=True,
        correction=CorrectionConfig(kind="masked", level="sequence", low=0.5, high=3.0)), 64)
    for part in ("sum / (sequences * 64)", "no std", "entropy bonus 0.01", "truncated samples masked",
                 "overlong punishment 1 over the last 16 tokens", "dynamic sampling",
                 "masked importance sampling by sequence 0.5..3"):
        assert part in other.describe()
    assert "importance" not in resolve(ObjectiveConfig(correction=CorrectionConfig(kind="none")), 64).describe()


def test_sequences_are_needed_by_ratio_or_correction():
    token, by_sequence = CorrectionConfig(), CorrectionConfig(level="sequence")
    assert not resolve(ObjectiveConfig(algorithm="grpo", correction=token), 8).needs_sequences
    assert resolve(ObjectiveConfig(algorithm="grpo", correction=by_sequence), 8).needs_sequences
    assert resolve(ObjectiveConfig(algorithm="gspo_token", correction=token), 8).needs_sequences
    off = CorrectionConfig(kind="none", level="sequence")
    assert not resolve(ObjectiveConfig(algorithm="dapo", correction=off), 8).needs_sequences


@pytest.mark.parametrize("settings, where", [
    (dict(kl=KLConfig(coefficient=0.1, estimator="k1")), "objective.kl.estimator"),
    (dict(overlong_buffer=64), "objective.overlong_buffer"),
    (dict(clip_low=1.5), "objective.clip_low"),
    (dict(correction=CorrectionConfig(high=0.9)), "objective.correction.high"),
    (dict(correction=CorrectionConfig(low=0.5)), "objective.correction.low"),
    (dict(correction=CorrectionConfig(kind="masked", low=1.5, high=2.0)), "objective.correction.low"),
])
def test_contradictions_are_the_users_to_correct(settings, where):
    with pytest.raises(UserMistake) as caught:
        resolve(ObjectiveConfig(**settings), 64)
    assert caught.value.where == where and caught.value.remedy


@pytest.mark.parametrize("kl", [
    KLConfig(coefficient=0.1, estimator="k1", place="reward"), KLConfig(coefficient=0.0, estimator="k1")])
def test_k1_is_right_in_the_reward_and_idle_without_coefficient(kl):
    assert resolve(ObjectiveConfig(kl=kl), 64).kl_in_reward == (kl.coefficient > 0)
