"""The mathematical expression in the response equals the label, by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from megarl.reward.registry import PromptView, reward


@reward("maths", packages={"math_verify": "math-verify"})
def maths(response: str, label: Any, prompt: PromptView, *, digits: int = 6) -> float:
    r"""1.0 if math-verify finds the answer of the response equal to the label; else 0.0.

    Both are parsed as LaTeX or plain expressions. A label without LaTeX delimiters (`\frac{1}{2}`) is also tried
    between dollar signs. math-verify's own time limits are off: they use SIGALRM, and the worker has a limit.

    Args:
        digits: decimal places to which floats are compared.

    Raises:
        ValueError: the label cannot be parsed.
    """
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that the time limits are off
    gold = []
    for text in (f"${label}$", str(label)) if "$" not in str(label) and "\\boxed" not in str(label) else (str(label),):
        gold = gold or parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the label {label!r} is no mathematical expression")
    answer = parse(response, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, float_rounding=digits, timeout_seconds=None))
