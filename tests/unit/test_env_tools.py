"""Tool calls as models write them, against literal examples of each family."""

from __future__ import annotations

import pytest
from chat_templates import FORMS, TEMPLATES, TOOLS

from megarl.rollout.environments.tools import FORMATS, Parsed, ToolCall, detect

ADD = ToolCall("add", {"a": 1, "b": 2})
NOW = ToolCall("now", {})

READ = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', Parsed("", (ADD,))),
    ("hermes", 'First.\n<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>\n<tool_call>\n{"name": "now"}\n'
     '</tool_call>', Parsed("First.", (ADD, NOW))),
    ("hermes", '<think>\nsay <3\n</think>\n\n<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n'
     '</tool_call>', Parsed("<think>\nsay <3\n</think>", (ADD,))),
    ("hermes", "just words", Parsed("just words")),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', Parsed("", (ADD,))),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
     Parsed("", (ADD, NOW))),
    ("llama3", 'It is {"a": 1}.', Parsed('It is {"a": 1}.')),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}, '
     '{"name": "now", "arguments": {}}]', Parsed("", (ADD, NOW))),
    ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
     Parsed("Well.", (ADD, NOW))),
    ("deepseek", 'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n'
     '```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>'
     '<｜tool▁calls▁end｜>', Parsed("So.", (ADD, NOW))),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
     '<｜tool▁calls▁end｜>', Parsed("", (ADD,))),
    ("glm", "<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", Parsed("<think>hm</think>", (ADD, NOW))),
    ("glm", "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>12</arg_value>\n<arg_key>free</arg_key>\n<arg_value>"
     "so so</arg_value></tool_call>", Parsed("", (ToolCall("add", {"note": "12", "free": "so so"}),))),
    ("none", '<tool_call>{"name": "add"}</tool_call>', Parsed('<tool_call>{"name": "add"}</tool_call>'))]


@pytest.mark.parametrize("form, text, expected", READ)
def test_calls_are_read(form: str, text: str, expected: Parsed) -> None:
    assert FORMATS[form](text, TOOLS) == expected


BROKEN = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'),
    ("hermes", '<tool_call>["add", 1, 2]</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>'),
    ("llama3", '{"name": "add", "parameters": {"a": 1}'),
    ("llama3", '{"answer": 3}'),
    ("llama3", '{"name": "add", "parameters": {}} and more'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\n```<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key></tool_call>"),
    ("glm", "<tool_call>\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'),  # half of a character
    ("llama3", '{"name": "add", "parameters": {"a": "\\ud83d"}}')]


@pytest.mark.parametrize("form, text", BROKEN)
def test_what_cannot_be_read_is_an_error_and_no_call(form: str, text: str) -> None:
    parsed = FORMATS[form](text, TOOLS)
    assert len(parsed.errors) == 1 and not [call for call in parsed.calls if call.name != "add"]


def test_a_broken_call_does_not_hide_the_others() -> None:
    parsed = FORMATS["hermes"]('<tool_call>{</tool_call><tool_call>{"name": "now"}</tool_call>', ())
    assert parsed.calls == (NOW,) and len(parsed.errors) == 1


@pytest.mark.parametrize("depth", [100_000])
def test_deeply_nested_text_breaks_nothing(depth: int) -> None:
    assert FORMATS["hermes"]("<tool_call>" + "[" * depth + "</tool_call>", ()).errors
    assert FORMATS["llama3"]('{"name": ' + "[" * depth, ()).errors
    text = "[" * depth
    (call,) = FORMATS["glm"](f"<tool_call>add<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>").calls
    assert call.arguments == {"a": text}


@pytest.mark.parametrize("tool", [
    "add", {"function": None}, {"function": {}}, {"function": {"name": "add", "parameters": None}},
    {"function": {"name": "add", "parameters": {"properties": {"a": True}}}}])
def test_a_tool_without_a_schema_says_nothing_of_its_arguments(tool: object) -> None:
    text = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert FORMATS["glm"](text, [tool]).calls == (ToolCall("add", {"a": 1}),)


def test_the_form_is_found_in_the_template() -> None:
    assert {family: detect(template) for family, template in TEMPLATES.items()} == FORMS
    assert detect(None) == detect("{{ messages }}") == "none"
