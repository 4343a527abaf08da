"""Length shaping: a term that falls as a response grows."""

from __future__ import annotations

from typing import Any, Literal

from megarl.reward.registry import PromptView, reward


def _check(soft: int, hard: int, unit: str = "tokens") -> None:
    if not 0 <= soft < hard:
        raise ValueError(f"soft {soft} and hard {hard} must satisfy 0 <= soft < hard")


@reward("length", check=_check)
def length(response: str, label: Any, prompt: PromptView, *, soft: int, hard: int,
           unit: Literal["tokens", "words", "characters"] = "tokens") -> float:
    """1.0 up to `soft` units, 0.0 from `hard` on, linear in between. With a negative weight it rewards length."""
    count = {"tokens": prompt.response_tokens, "words": len(response.split()), "characters": len(response)}[unit]
    return min(1.0, max(0.0, (hard - count) / (hard - soft)))
