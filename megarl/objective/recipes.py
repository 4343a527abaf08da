"""The objective, resolved: every choice of the loss in one frozen value, printed at start and stored with checkpoints.

Published settings:

    grpo        DeepSeekMath (arXiv 2402.03300, eq. 3 and 4): token ratio, clip .2, mean over a sequence's tokens, then
                over sequences; advantages divided by the group's standard deviation. (The clip is PPO's.)
    gspo        GSPO (arXiv 2507.18071, eq. 5 and 7): ratio of a sequence = exp(mean token log-ratio), clip 3e-4 / 4e-4.
    gspo_token  the same, eq. 13 and 14: the value of the sequence ratio, the gradient through each token.
    dapo        DAPO (arXiv 2503.14476, eq. 8): clip .2 / .28, sum over tokens / tokens of the step, groups without a
                signal are replaced. Its overlong filter and soft punishment are switched on by their own keys,
                mask_truncated and overlong_buffer (the paper: 4096 of 20480 tokens).
    dr_grpo     Dr. GRPO (arXiv 2503.20783): no standard deviation, divisor sequences * max_response_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from megarl.errors import UserMistake

_RECIPES: dict[str, dict[str, object]] = {
    "grpo": dict(ratio="token", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean", normalize_std=True,
                 dynamic_sampling=False),
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean", normalize_std=True,
                 dynamic_sampling=False),
    "gspo_token": dict(ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
                       normalize_std=True, dynamic_sampling=False),
    "dapo": dict(ratio="token", clip_low=0.2, clip_high=0.28, aggregation="token_mean", normalize_std=True,
                 dynamic_sampling=True),
    "dr_grpo": dict(ratio="token", clip_low=0.2, clip_high=0.2, aggregation="constant", normalize_std=False,
                    dynamic_sampling=False),
}


@dataclass(frozen=True)
class Objective:
    """What is minimised; fields as in `config.schema.ObjectiveConfig`, all decided.

    Attributes:
        max_response_tokens: the constant divisor's factor, and where overlong punishment ends.
    """

    algorithm: str
    ratio: Literal["token", "sequence", "sequence_token"]
    clip_low: float
    clip_high: float
    aggregation: Literal["sequence_mean", "token_mean", "constant"]
    normalize_std: bool
    std_over: Literal["group", "task"]
    std_ddof: int
    std_eps: float
    kl: KLConfig
    entropy_bonus: float
    proximal: Literal["old", "behaviour"]
    correction: CorrectionConfig
    dynamic_sampling: bool
    mask_truncated: bool
    overlong_buffer: int
    overlong_penalty: float
    max_response_tokens: int

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term needs the reference model's log-probs."""
        return self.kl.coefficient > 0

    @property
    def needs_sequences(self) -> bool:
        """Whether sums over whole sequences enter the loss: the ratio's, or the correction's."""
        correction = self.correction
        return (self.ratio != "token" or (correction.kind != "none" and correction.level != "token")
                or correction.reject in ("sequence", "geometric"))

    @property
    def needs_engine(self) -> bool:
        """Whether the engine's log-probs enter the loss."""
        return self.proximal == "behaviour" or self.correction.kind != "none" or self.correction.reject != "none"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.needs_reference and self.kl.place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is taken off the reward."""
        return self.needs_reference and self.kl.place == "reward"

    def describe(self) -> str:
        """The whole objective in one line."""
        divisors = {"sequence_mean": "mean over tokens, then sequences", "token_mean": "sum / tokens of the step",
                    "constant": f"sum / (sequences * {self.max_response_tokens})"}
        std = f"{self.std_over} std (ddof {self.std_ddof}, eps {self.std_eps:g})" if self.normalize_std else "no std"
        naive = " to the engine's log-probs (naive)" if self.proximal == "behaviour" else ""
        parts = [self.algorithm, f"{self.ratio} ratio{naive}", f"clip {self.clip_low:g}/{self.clip_high:g}",
                 divisors[self.aggregation], f"advantage: reward - group mean, {std}"]
        if self.needs_reference:
            parts.append(f"KL {self.kl.coefficient:g} {self.kl.estimator} in the {self.kl.place}")
        if self.entropy_bonus:
            parts.append(f"entropy bonus {self.entropy_bonus:g}")
        if self.correction.kind != "none":
            low = f"{self.correction.low:g}.." if self.correction.kind == "masked" else "<= "
            parts.append(f"{self.correction.kind} importance sampling by {self.correction.level} "
                         f"{low}{self.correction.high:g}")
        if self.correction.reject != "none":
            parts.append(f"rejection by {self.correction.reject} {self.correction.reject_low:g}.."
                         f"{self.correction.reject_high:g}")
        if self.dynamic_sampling:
            parts.append("dynamic sampling")
        if self.mask_truncated:
            parts.append("truncated samples masked")
        if self.overlong_buffer:
            parts.append(f"overlong punishment {self.overlong_penalty:g} over the last {self.overlong_buffer} tokens")
        return ", ".join(parts)


def resolve(config: ObjectiveConfig, max_response_tokens: int) -> Objective:
    """Fill in what the algorithm's recipe decides and refuse what cannot mean anything.

    Raises:
        UserMistake: k1 in the loss, whose expected gradient is zero; an overlong buffer longer than the response;
            bounds of the clip or the correction that shut out the ratio 1 of equal policies, or that are not used; a
            weight beside the naive ratio, which holds it already.
    """
    if config.kl.coefficient and config.kl.place == "loss" and config.kl.estimator == "k1":
        raise UserMistake("the gradient of k1 in the loss is 0 in expectation", "objective.kl.estimator",
                          "use k2 or k3, or set objective.kl.place: reward")
    if config.overlong_buffer >= max_response_tokens:
        raise UserMistake(f"{config.overlong_buffer} is not below rollout.max_response_tokens ({max_response_tokens})",
                          "objective.overlong_buffer", "use a part of the response length, or 0")
    _check_correction(config.correction, config.proximal)
    if config.mask_truncated and config.kl.coefficient and config.kl.place == "reward":
        raise UserMistake("truncated samples are in no forward pass, so their reward cannot have its KL taken off",
                          "objective.mask_truncated", "set it to false, or objective.kl.place: loss")
    recipe = _RECIPES[config.algorithm]
    decided = {name: value if getattr(config, name) is None else getattr(config, name)
               for name, value in recipe.items()}
    if decided["clip_low"] > 1:
        raise UserMistake(f"{decided['clip_low']:g} puts the lower bound of the ratio below 0", "objective.clip_low",
                          "use a value from 0 to 1")
    given = {name: getattr(config, name) for name in (
        "algorithm", "std_over", "std_ddof", "std_eps", "kl", "entropy_bonus", "proximal", "correction",
        "mask_truncated", "overlong_buffer", "overlong_penalty")}
    return Objective(max_response_tokens=max_response_tokens, **decided, **given)


def _check_correction(correction: CorrectionConfig, proximal: str) -> None:
    """Refuse bounds that would cut the weight 1 of an engine that agrees with the trainer, or mean nothing."""
    if proximal == "behaviour" and correction.kind != "none":
        raise UserMistake(f"{correction.kind} would weigh twice: the ratio to the engine's log-probs holds old / "
                          "engine already", "objective.correction.kind",
                          "set none (reject may stay), or objective.proximal: old")
    pairs = [("low", "high", "cut")] if correction.kind != "none" else []
    pairs += [("reject_low", "reject_high", "reject")] if correction.reject != "none" else []
    for low, high, does in pairs:
        for name, is_wrong, right in ((low, getattr(correction, low) > 1, "use 1 or less"),
                                      (high, getattr(correction, high) < 1, "use 1 or more")):
            if is_wrong:
                raise UserMistake(f"{getattr(correction, name):g} would {does} the weight 1 of an engine that agrees "
                                  "with the trainer", f"objective.correction.{name}", right)
    if correction.kind == "truncated" and correction.low:
        raise UserMistake(f"{correction.low:g} would not be used: truncation cuts at high only",
                          "objective.correction.low", "leave it at 0, or set objective.correction.kind: masked")
