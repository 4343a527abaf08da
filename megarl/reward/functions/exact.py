"""The response is the label."""

from __future__ import annotations

import unicodedata
from typing import Any

from megarl.reward.registry import PromptView, reward


@reward("exact")
def exact(response: str, label: Any, prompt: PromptView, *, ignore_case: bool = False) -> float:
    """1.0 if the response equals the label, or one of them if it is a list; else 0.0.

    Both sides are compared in Unicode NFC without leading and trailing white space; a label that is no string is
    compared as its `str`.

    Raises:
        ValueError: there is no label.
    """
    labels = label if isinstance(label, list) else [label]
    if label is None or not labels:
        raise ValueError("no label")
    return float(_plain(response, ignore_case) in [_plain(str(item), ignore_case) for item in labels])


def _plain(text: str, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFC", text).strip()
    return text.casefold() if ignore_case else text
