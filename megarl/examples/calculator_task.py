"""A task with a tool: `17*23-8` is to be answered with 383, which a tiny model cannot work out but a calculator can.

The environment, its prompts, and the dialogues of the warm start. torch is not needed here.
"""

from __future__ import annotations

import ast
import hashlib
import operator
from collections.abc import Iterator

import numpy as np

from megarl.examples.dialogues import Dialogue, calls, says, tool, user
from megarl.rollout.environments.protocol import Action, Step, Task

NAME = "calculator"
TOOL = {"type": "function", "function": {
    "name": "calculate", "description": "Work out an arithmetic expression.", "parameters": {
        "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}
LONGEST = 64  # characters of an expression
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """Reward 1 for a last reply that is the right number, 0 for any other; a calculator for the way there.

    Args:
        per_call: reward of each reply that calls the tool, for instance a small price of -0.05.
    """

    tools = [TOOL]

    def __init__(self, *, per_call: float = 0.0) -> None:
        self._per_call, self._right = per_call, ""

    async def reset(self, task: Task) -> None:
        """The prompt is the task's own."""
        self._right = str(task.label)

    async def step(self, action: Action) -> Step:
        """Work out calls; a reply without one is the answer."""
        if not action.calls and not action.errors:
            return Step("", float(action.content.strip() == self._right), True)
        if action.errors:
            return Step("error", self._per_call)
        answers = [tool(calculate(str(call.arguments.get("expression", "")))) for call in action.calls]
        return Step(answers, self._per_call)


def calculate(expression: str) -> str:
    """The value of a sum of products of whole numbers, or "error"."""
    try:
        return str(_value(ast.parse(expression, mode="eval").body) if len(expression) <= LONGEST else "error")
    except (SyntaxError, ValueError, RecursionError):
        return "error"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


def questions(rng: np.random.Generator, *, held_out: bool) -> Iterator[str]:
    """Endless expressions of three numbers, of one side of the split: a tenth is for tests alone."""
    while True:
        first, second, third = (str(rng.integers(1, 100)) for _ in range(3))
        one, two = rng.choice(["+", "-", "*"], 2)
        expression = f"{first}{one}{second}{two}{third}"
        if (hashlib.sha256(expression.encode()).digest()[0] % 10 == 0) == held_out:
            yield expression


def warm_questions(rng: np.random.Generator) -> Iterator[str]:
    """Those of the warm start."""
    return questions(rng, held_out=False)


def label(expression: str) -> str:
    """The right answer."""
    return calculate(expression)


def dialogue(expression: str, rng: np.random.Generator, right: float) -> Dialogue:
    """The right procedure with probability `right`, else one of three wrong ones.

    Wrong are: to answer at once with the first number; to leave the last number out of the call; to call rightly and
    answer with the first number.
    """
    first = "".join(character if character.isdigit() else " " for character in expression).split()[0]
    short = expression.rstrip("0123456789")[:-1]
    kind = 3 if rng.random() < right else int(rng.integers(3))
    if kind == 0:
        return [user(expression), says(first)]
    called = short if kind == 1 else expression
    return [user(expression), calls("calculate", expression=called), tool(calculate(called)),
            says(first if kind == 2 else calculate(called))]
