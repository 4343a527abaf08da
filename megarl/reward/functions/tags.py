"""The response has the form that was asked for."""

from __future__ import annotations

import re
from typing import Any

from megarl.reward.registry import PromptView, reward


def _check(names: list[str] | None = None) -> None:
    for name in names or ():
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{name!r} is not the name of a tag")


@reward("tags", check=_check)
def tags(response: str, label: Any, prompt: PromptView, *, names: list[str] | None = None) -> float:
    """1.0 if the response is these tags in this order, each once, with nothing but white space around; else 0.0.

    Args:
        names: default think, answer: `<think>...</think><answer>...</answer>`.
    """
    wanted = names or ["think", "answer"]
    found = re.findall(rf"<(/?(?:{'|'.join(map(re.escape, wanted))}))>", response)
    if found != [part for name in wanted for part in (name, f"/{name}")]:
        return 0.0
    outside = response
    for name in wanted:
        outside = re.sub(rf"<{name}>.*?</{name}>", "", outside, flags=re.DOTALL)
    return float(not outside.strip())
