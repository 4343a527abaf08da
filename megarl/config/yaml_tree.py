"""YAML text to plain values, with the line of every key.

YAML 1.2's scalars: `1e-6` is a number, `yes`, `no`, `on`, `off`, dates and `1:30` are text. A key given twice is a
mistake.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megarl.errors import UserMistake


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema (underscores in numbers are accepted)."""

    yaml_implicit_resolvers: dict[str, list] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader above would not read back as text."""

    yaml_implicit_resolvers: dict[str, list] = {}


for _tag, _pattern, _first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
        ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
         r"|\.(?:nan|NaN|NAN)", list("-+0123456789.")),
        ("merge", r"<<", ["<"])):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
# PyYAML reads a leading 0 as octal
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value.replace("_", "")))

Lines = dict[tuple[str | int, ...], int]


def parse(text: str, name: str) -> tuple[Any, Lines]:
    """The document's value, and the line (from 1) of each key and list entry by its path.

    Args:
        text: one YAML document.
        name: of the file, for messages.
    Raises:
        UserMistake: not YAML, or a key twice in one mapping.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: Lines = {}
        if node is None:
            return None, lines
        _walk(node, (), lines, name)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and "\n" in text else name
        raise UserMistake(f"not YAML: {error.problem or error.context}", where) from error
    except yaml.YAMLError as error:
        raise UserMistake(f"not YAML: {str(error).splitlines()[0]}", name) from error
    finally:
        loader.dispose()


def dump(value: Any) -> str:
    """Plain values as YAML text that `parse` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _walk(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise UserMistake("a key must be a word", f"{name}:{line}")
            if key.value in seen:
                raise UserMistake(f"{key.value} stands here and in line {seen[key.value]}", f"{name}:{line}",
                                  "keep one of them")
            seen[key.value] = line
            lines[(*path, key.value)] = line
            _walk(value, (*path, key.value), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _walk(value, (*path, index), lines, name)
