"""The response chooses the letter of the label."""

from __future__ import annotations

import re
from typing import Any

from megarl.reward.functions.extract import last_boxed
from megarl.reward.registry import PromptView, reward


def chosen(response: str, choices: str = "ABCD") -> str | None:
    r"""The letter that a response settles on; None if it does not.

    In this order: `\boxed{B}`; the last "answer is B", "Answer: (B)", "option B" and the like; a last line that is the
    letter or starts with it ("B", "(B)", "B. Paris"). A letter elsewhere is no choice: "A" is also an article.
    """
    letter = f"([{re.escape(choices)}])"
    boxed = last_boxed(response)
    if boxed is not None:
        match = re.match(rf"\W*(?:\\?text\w*\W*)?{letter}(?!\w)", boxed)
        return match.group(1) if match else None
    said = re.findall(rf"\b(?i:answer|choice|option)(?:\s+(?i:is))?[^\w\n]*{letter}(?![\w'])", response)
    if said:
        return said[-1]
    lines = response.strip().splitlines()
    match = re.match(rf"\W*{letter}(?:[).:]|\W*$)", lines[-1]) if lines else None
    return match.group(1) if match else None


@reward("multiple_choice")
def multiple_choice(response: str, label: Any, prompt: PromptView, *, choices: str = "ABCD") -> float:
    """1.0 if the response settles on the label; else 0.0.

    Args:
        choices: the letters that can be chosen, upper case.

    The label is a letter ("B", "(b)") or the number of a choice, from 0.

    Raises:
        ValueError: the label is neither.
    """
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(choices):
        target = choices[label]
    else:
        target = str(label).strip("() .").upper()
        if len(target) != 1 or target not in choices:
            raise ValueError(f"the label {label!r} is none of {choices}")
    return float(chosen(response, choices) == target)
