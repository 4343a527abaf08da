"""A reasoning-gym task judges the answer to one of its entries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from megarl.reward.functions.extract import last_tagged
from megarl.reward.registry import PromptView, reward


@reward("reasoning_gym", packages={"reasoning_gym": "reasoning-gym"})
def reasoning_gym(response: str, label: Any, prompt: PromptView, *, task: str = "",
                  answer_tag: str = "answer") -> float:
    """The score, usually in [0, 1], that the task's `score_answer` gives.

    The prompt's extra columns hold `entry` (the dict that the task generated, or it as JSON) and, unless the option
    `task` is set, `task` (the data set's name, such as "chain_sum"). The label is not used.

    Args:
        answer_tag: the answer is the content of the last such tag (`<answer>...</answer>`) if there is one, else the
            whole response.

    Raises:
        ValueError: no entry or task in the extra columns, or an unknown task.
    """
    entry = prompt.extra.get("entry")
    entry = json.loads(entry) if isinstance(entry, str) else entry
    name = task or prompt.extra.get("task")
    if not isinstance(entry, dict) or not name:
        raise ValueError("the prompt's row needs the columns `entry` and `task` (or the option `task`)")
    tagged = last_tagged(response, answer_tag)
    return float(_scorer(name)(answer=tagged if tagged is not None else response.strip(), entry=entry))


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
