"""The number in the response is the number of the label, within a tolerance."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Literal

from megarl.reward.functions.extract import last_boxed
from megarl.reward.registry import PromptView, reward

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
                     r"(?:\s?/\s?\d+(?![\d/]))?|(?<![\w.])[-+]?\.\d+")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LONGEST = 400  # characters of one number; longer ones are noise, and slow to convert


def last_number(text: str) -> Fraction | None:
    r"""The last number of the text, exactly; None without one.

    Understands signs (also U+2212), thousands separators (1,234), decimals, exponents of up to three digits, a/b and
    \frac{a}{b}. A digit inside a word (`m2`) is no number.
    """
    plain = text.replace("\u2212", "-").replace("{,}", ",").replace(r"\,", "").replace(r"\!", "")
    found = [match.group() for match in _NUMBER.finditer(_FRACTION.sub(r"\1/\2", plain))]
    for number in reversed(found):
        numerator, _, denominator = number.replace(",", "").replace(" ", "").partition("/")
        if len(number) <= _LONGEST and (not denominator or int(denominator)):
            return Fraction(numerator) / (int(denominator) if denominator else 1)
    return None


@reward("numeric")
def numeric(response: str, label: Any, prompt: PromptView, *, extract: Literal["auto", "boxed", "last"] = "auto",
            absolute: float = 1e-6, relative: float = 0.0) -> float:
    r"""1.0 if |answer - label| <= max(absolute, relative * |label|), computed in exact fractions; else 0.0.

    Args:
        extract: where the answer is: the last number inside the last \boxed{...} ("boxed"), the last number of the
            response ("last"), or "auto": boxed if there is one, else last.

    Raises:
        ValueError: the label holds no number.
    """
    target = last_number(str(label))
    if target is None or isinstance(label, bool):
        raise ValueError(f"the label {label!r} holds no number")
    boxed = last_boxed(response) if extract != "last" else None
    answer = last_number(boxed if boxed is not None else response) if boxed is not None or extract != "boxed" else None
    if answer is None:
        return 0.0
    return float(abs(answer - target) <= max(Fraction(absolute), Fraction(relative) * abs(target)))
