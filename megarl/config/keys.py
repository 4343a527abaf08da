"""What can be set: a walk over the schema that serves error messages, did-you-mean and the reference document."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.config.schema import Config

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping",
          type(None): "null", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """One key of the tree.

    Attributes:
        path: dotted, with `[]` for the entries of a list ("data.sources[].path").
        expects: what a value must be, to be read after "is not".
        default: JSON text; "" where the key must be given.
        description: one sentence.
        section: whether it holds keys of its own.
        listed: whether it is a list of sections.
    """

    path: str
    expects: str
    default: str
    description: str
    section: bool
    listed: bool


def expects(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """A type and its bounds in words: "a whole number above 0", "one of low, high", "a number or null"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return expects(arguments[0], [*constraints, *arguments[1:]])
    if origin is Literal:
        words = [str(value) for value in arguments]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin in (Union, types.UnionType):
        return " or ".join(expects(argument, constraints) for argument in arguments)
    if origin is list:
        return "a list" if _section(arguments[0]) else f"a list, each entry {expects(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {expects(arguments[0])}"
    if origin is dict:
        return _KINDS[dict]
    if _section(annotation):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    return _KINDS[annotation] + _bounds(constraints)


def _bounds(constraints: Sequence[Any]) -> str:
    words = []
    for constraint in constraints:
        for part in getattr(constraint, "metadata", [constraint]):
            for name, word in (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "of at most")):
                if (bound := getattr(part, name, None)) is not None:
                    words.append(f"{word} {bound}")
    return "".join(f" {word}" if i == 0 else f" and {word}" for i, word in enumerate(words))


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation stands for, if it is one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _entries(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry of a list is, if the annotation is a list of sections."""
    return _section(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is list else None


def _key(path: str, field: FieldInfo) -> Key:
    missing = field.default is PydanticUndefined and field.default_factory is None
    default = None if missing else field.get_default(call_default_factory=True)
    listed = _entries(field.annotation) is not None
    section = listed or _section(field.annotation) is not None
    text = "" if missing else ("[]" if listed else "{}") if section else json.dumps(default)
    return Key(path, expects(field.annotation, field.metadata), text, field.description or "", section, listed)


def walk(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Every key in the order of the schema, each section before its own keys."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield _key(path, field)
        if inner := _section(field.annotation):
            yield from walk(inner, f"{path}.")
        elif inner := _entries(field.annotation):
            yield from walk(inner, f"{path}[].")


def section_at(location: Sequence[str | int]) -> type[BaseModel] | None:
    """The section at a location: () is the whole tree, ("data", "sources", 0) an entry of a list; None for others."""
    section: type[BaseModel] | None = Config
    listed: type[BaseModel] | None = None
    for part in location:
        if isinstance(part, int):
            section, listed = listed, None
        elif section is None or part not in section.model_fields:
            return None
        else:
            annotation = section.model_fields[part].annotation
            section, listed = _section(annotation), _entries(annotation)
    return section


def lookup(location: Sequence[str | int]) -> tuple[list[str | int], Key | None]:
    """The part of a location that leads to the deepest key in it, and that key.

    A location may go on below a key: into a mapping without a schema, an entry of a list, or pydantic's union tags.
    """
    for end in range(len(location), 0, -1):
        parent, last = section_at(location[:end - 1]), location[end - 1]
        if section_at(location[:end]) and isinstance(last, int):
            return list(location[:end]), None
        if parent is not None and last in parent.model_fields:
            return list(location[:end]), _key(".".join(map(str, location[:end])), parent.model_fields[last])
    return [], None


def close(word: str, known: Sequence[str]) -> str | None:
    """The known word that a mistyped one resembles."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def nearest(path: str, siblings: Sequence[str]) -> list[str]:
    """Dotted names that an unknown `path` may have meant: in its own section first, then anywhere in the tree.

    Args:
        path: the unknown key, dotted.
        siblings: the names known beside it.
    """
    parent, _, last = path.rpartition(".")
    if beside := close(last, siblings):
        return [f"{parent}.{beside}" if parent else beside]
    names = [key.path for key in walk()]
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return same[:3]
    ends = {name: name.rpartition(".")[2] for name in names}
    elsewhere = difflib.get_close_matches(last, sorted(set(ends.values())), n=1, cutoff=0.75)
    return [name for name in names if ends[name] in elsewhere][:3]
