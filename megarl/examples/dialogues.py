"""Messages of the warm start's dialogues."""

from __future__ import annotations

from typing import Any

Dialogue = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    """The question."""
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    """A reply in words."""
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: str) -> dict[str, Any]:
    """A reply that calls a tool."""
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}}]}


def tool(text: str) -> dict[str, Any]:
    """What a tool answers."""
    return {"role": "tool", "content": text}
