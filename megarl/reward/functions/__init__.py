"""The reward functions that come with megarl. Importing this package registers them; it imports no verifier library."""

from megarl.reward.functions import (  # noqa: F401
    exact,
    length,
    maths,
    multiple_choice,
    numeric,
    reasoning_gym,
    regex,
    tags,
)
