"""What environments are made of: the types that a user's code sees. Light; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megarl.rollout.environments.tools import ToolCall

Message = dict[str, Any]
Observation = str | Message | Sequence[Message]


@dataclass(frozen=True)
class Task:
    """One prompt of the data, as an environment sees it.

    Attributes:
        text: the prompt as in the data: text, or a list of chat messages.
        label: the reference answer, as in the data.
        source: name of the data source.
        extra: the row's other columns.
        position, n: (position, n) is unique to an episode in a run; several n share one prompt.
        seed: a function of (run.seed, position, n), for whatever the environment draws.
    """

    text: Any
    label: Any = None
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    n: int = 0
    seed: int = 0

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages; text is what the user says."""
        return as_messages(self.text, "user")


@dataclass(frozen=True)
class Action:
    """What the model said in a turn.

    Attributes:
        text: all of it, special tokens shown, without the token that ended it.
        content: the text outside tool calls.
        calls: its tool calls, in order.
        errors: one line for each call that could not be read.
        finish: "stop", or "length" if it was cut by a limit.
        tokens: how many were sampled.
    """

    text: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    finish: str = "stop"
    tokens: int = 0


class Step(NamedTuple):
    """What the environment answers.

    Attributes:
        observation: what the model reads next: a message, several, or text (of role tool after a tool call, else of
            role user). Not used when done.
        reward: of this turn.
        done: the episode ends.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode. A new object is made for each, with the options of the config as keyword arguments.

    Optional members: `tools`, a list of OpenAI tool definitions, read after `reset`; `async finish() -> float`, a
    reward added at the end of every episode, whatever ended it; `async close()`, always called last, to free what the
    environment holds.
    """

    async def reset(self, task: Task) -> Observation | None:
        """The first prompt: messages, or text (of role user); None: the task's own."""
        ...

    async def step(self, action: Action) -> Step | tuple[Observation, float, bool]:
        """Answer the model."""
        ...


class NoRoom(Exception):
    """The conversation has reached its limit of tokens or of turns: the model is not asked again in this episode."""


def as_messages(observation: Observation, role: str) -> list[Message]:
    """Messages; text becomes one of the given role.

    Raises:
        TypeError: it is nothing of the kind.
    """
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    messages = [observation] if isinstance(observation, dict) else list(observation)
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise TypeError(f"{message!r:.80} is not a chat message with a role")
    if not messages:
        raise TypeError("an observation without messages")
    return messages
