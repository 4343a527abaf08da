"""The response matches a regular expression, or the part that it captures is the label."""

from __future__ import annotations

import re
from typing import Any, Literal

from megarl.reward.registry import PromptView, reward


def _check(pattern: str, mode: str = "search", group: int | str | None = None) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if group is not None and group not in (*compiled.groupindex, *range(compiled.groups + 1)):
        raise ValueError(f"{pattern!r} has no group {group!r}")


@reward("regex", check=_check)
def regex(response: str, label: Any, prompt: PromptView, *, pattern: str, mode: Literal["search", "full"] = "search",
          group: int | str | None = None) -> float:
    """1.0 if the pattern is found in the response ("search") or covers it ("full"); else 0.0.

    With `group`, that group of the last match must also equal the label, both stripped.

    Raises:
        ValueError: `group` is given and there is no label.
    """
    compiled = re.compile(pattern)
    found = [compiled.fullmatch(response)] if mode == "full" else list(compiled.finditer(response))
    if not found or found[-1] is None:
        return 0.0
    if group is None:
        return 1.0
    if label is None:
        raise ValueError("no label")
    return float((found[-1].group(group) or "").strip() == str(label).strip())
