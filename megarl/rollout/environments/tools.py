"""Tool calls as models write them: from a reply's text to names and arguments.

One small parser per family, for whole replies (nothing is streamed here). SGLang and vLLM have such parsers too, but
inside servers that cannot be imported for them alone. A call that cannot be read is not guessed at: it is reported in
`Parsed.errors`, its text is in no other field, and the environment decides what to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One call: the tool's name, its arguments by name, and the id by which a message of role tool answers it."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Parsed:
    """A reply taken apart.

    Attributes:
        content: the text outside the calls (thoughts included), stripped.
        calls: in the order written.
        errors: one line for each call that could not be read.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


class Malformed(ValueError):
    """Text where a call should stand is none."""


Parser = Callable[[str, Sequence[dict[str, Any]]], Parsed]


def plain(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """No tool calls at all."""
    return Parsed(text.strip())


def hermes(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """Qwen 2.5 and 3, Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    return _blocks(text, "<tool_call>", "</tool_call>", lambda block: _call(_json(block), "arguments"))


def llama3(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """Llama 3.1 and later: the whole reply is `{"name": ..., "parameters": {...}}`; several are separated by `;`.

    `<|python_tag|>` may stand in front. A reply that does not begin with a brace is text.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return Parsed(text.strip())
    calls, decoder = [], json.JSONDecoder()
    try:
        while body:
            value, end = decoder.raw_decode(body)
            calls.append(_call(value, "parameters", "arguments"))
            body = body[end:].strip()
            if body and not body.startswith(";"):
                raise Malformed(f"after a call stands {body[:40]!r}")
            body = body.removeprefix(";").strip()
    except (ValueError, RecursionError) as error:
        return Parsed("", tuple(calls), (_told(error, body),))
    return Parsed("", tuple(calls))


def mistral(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` per call."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return Parsed(text.strip())
    if rest.lstrip().startswith("["):
        try:
            values = _json(rest)
            if not isinstance(values, list):
                raise Malformed("not a list of calls")
            return Parsed(content.strip(), tuple(_call(value, "arguments") for value in values))
        except Malformed as error:
            return Parsed(content.strip(), (), (_told(error, rest),))
    calls, errors = [], []
    for block in rest.split("[TOOL_CALLS]"):
        _collect(_mistral_call, block, calls, errors)
    return Parsed(content.strip(), tuple(calls), tuple(errors))


def _mistral_call(block: str) -> ToolCall:
    name, _, arguments = block.partition("[ARGS]")
    return _named(name.partition("[CALL_ID]")[0], _json(arguments))


def deepseek(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """DeepSeek V3 and R1 (type, name, JSON in a code fence) and V3.1 (name, JSON), between their special tokens."""
    def read(block: str) -> ToolCall:
        head, separator, tail = block.partition("<｜tool▁sep｜>")
        if not separator:
            raise Malformed("there is no <｜tool▁sep｜>")
        fence = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", tail, re.DOTALL)
        name, arguments = fence.groups() if fence else (head, tail)
        return _named(name, _json(arguments))

    found = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)
    content = found.content.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "").strip()
    return Parsed(content, found.calls, found.errors)


def glm(text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """GLM 4.5: `<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`.

    A value is text where the tool's schema says string, else JSON; without a schema, JSON if it can be read as such.
    """
    def read(block: str) -> ToolCall:
        name = block.partition("<arg_key>")[0].strip()
        arguments, schema = {}, next((_at(tool, "function", "parameters", "properties") for tool in tools
                                      if _at(tool, "function", "name") == name), None)
        rest = block[block.find("<arg_key>"):] if "<arg_key>" in block else ""
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest, re.DOTALL)
        if rest.count("<arg_key>") != len(pairs):
            raise Malformed("an <arg_key> has no <arg_value>")
        for key, value in pairs:
            arguments[key.strip()] = _typed(value, _at(schema, key.strip(), "type"))
        return _named(name, arguments)

    return _blocks(text, "<tool_call>", "</tool_call>", read)


FORMATS: dict[str, Parser] = {"none": plain, "hermes": hermes, "llama3": llama3, "mistral": mistral,
                              "deepseek": deepseek, "glm": glm}


def detect(chat_template: str | None) -> str:
    """The name in FORMATS of what a chat template writes; "none" if it writes no known form of tool calls."""
    template = chat_template or ""
    for mark, name in (("<｜tool▁sep｜>", "deepseek"), ("[TOOL_CALLS]", "mistral"), ("<arg_key>", "glm"),
                       ("<tool_call>", "hermes"), ('"parameters": ', "llama3")):
        if mark in template:
            return name
    return "none"


def _blocks(text: str, begin: str, end: str, read: Callable[[str], ToolCall]) -> Parsed:
    """Calls between marks; a block that was never closed is an error."""
    outside, calls, errors = [], [], []
    content, *blocks = text.split(begin)
    outside.append(content)
    for block in blocks:
        inside, closed, after = block.partition(end)
        if closed:
            _collect(read, inside, calls, errors)
        else:
            errors.append(f"a call has no {end}: {inside.strip()[:80]!r}")
        outside.append(after)
    return Parsed("".join(outside).strip(), tuple(calls), tuple(errors))


def _collect(read: Callable[[str], ToolCall], text: str, calls: list[ToolCall], errors: list[str]) -> None:
    try:
        calls.append(read(text))
    except Malformed as error:
        errors.append(_told(error, text))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _call(value: Any, *keys: str) -> ToolCall:
    """From {"name": ..., one of keys: {...}}."""
    if not isinstance(value, dict):
        raise Malformed("not an object")
    arguments = next((value[key] for key in keys if key in value), {})
    return _named(value.get("name"), _json(arguments) if isinstance(arguments, str) else arguments)


def _named(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise Malformed("it has no name")
    if not isinstance(arguments, dict):
        raise Malformed("its arguments are not an object")
    try:  # whether it can be written again: halves of characters (\ud83d) cannot, nor what is nested too deeply
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error
    return ToolCall(name.strip(), arguments)


def _at(value: Any, *keys: str) -> Any:
    """What lies in nested objects; None where there is nothing of the kind."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _typed(value: str, kind: Any) -> Any:
    if kind == "string":
        return value
    try:
        return _json(value)
    except Malformed:
        return value


def _told(error: Exception, text: str) -> str:
    return f"{error}: {text.strip()[:80]!r}"
