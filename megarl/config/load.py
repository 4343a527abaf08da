"""From a YAML file and `a.b=c` overrides to a Config; every mistake with its line and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config import keys
from megarl.config.schema import Config
from megarl.config.yaml_tree import Lines, dump, parse
from megarl.errors import UserMistake, UserMistakes


@dataclass(frozen=True)
class Origin:
    """Where the values of a config were written down.

    Attributes:
        file: name of the YAML file.
        lines: line of each key by its path.
        overrides: each override by the path that it set, in their order.
    """

    file: str = ""
    lines: Lines = field(default_factory=dict)
    overrides: dict[tuple[str | int, ...], str] = field(default_factory=dict)

    def where(self, path: str | Sequence[str | int]) -> str:
        """A key for a message: `tiny.yaml:12: parallel.tensor`, or `override: parallel.tensor`.

        A section of the file of which overrides set keys has them with it: `tiny.yaml:12 with parallel.tensor=2:
        parallel`.
        """
        parts = tuple(_split(path)) if isinstance(path, str) else tuple(path)
        dotted = _dotted(parts)
        below = ", ".join(text for path, text in self.overrides.items() if path[:len(parts)] == parts)
        below = f" with {below}" if below else ""
        for end in range(len(parts), 0, -1):
            if parts[:end] in self.overrides:
                return f"override: {dotted}"
            if parts[:end] in self.lines:
                return f"{self.file}:{self.lines[parts[:end]]}{below}: {dotted}"
        return f"{self.file}{below}: {dotted}" if self.file else dotted


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: YAML file.
        overrides: `key.path=value` each, the value in YAML; list entries by number (`data.sources.0.weight=2`). A
            mapping is merged into the section that it is given for, anything else replaces what was there.
    Raises:
        UserMistake: all mistakes that can be seen without looking across keys (`config.check` does that).
    """
    return read(path, overrides)[0]


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Origin]:
    """As `load`, and also where each value came from."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserMistake(f"cannot be read: {reason}", name, "give the path of a YAML file") from error
    tree, lines = parse(text, name)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserMistake("must hold keys and values, not a list or a word", name,
                          f"start with the sections {', '.join(Config.model_fields)}")
    origin = Origin(name, lines, {_override(tree, text): text for text in overrides})
    return build(tree, origin), origin


def build(tree: dict[str, Any], origin: Origin | None = None) -> Config:
    """A Config from plain values (as YAML gives them).

    Raises:
        UserMistakes: one for each unknown key, missing key and wrong value.
    """
    origin = origin or Origin()
    tree = _fill_sections(tree, ())
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        told: dict[str, UserMistake] = {}
        for entry in error.errors(include_url=False):
            mistake = _explain(entry, tree, origin)
            told.setdefault(mistake.where, mistake)  # a union reports once for each of its branches
        raise UserMistakes(list(told.values())) from None


def save_effective(config: Config, path: str | Path) -> None:
    """Write the whole tree, defaults included, as a YAML file that `load` reads back to an equal Config."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def to_yaml(config: Config) -> str:
    """The whole tree as YAML text."""
    return dump(config.model_dump(mode="json"))


def _fill_sections(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A section whose keys are all commented out is null in YAML: take it as empty."""
    filled = {}
    for name, value in tree.items():
        section = keys.section_at((*path, name)) is not None
        value = {} if section and value is None else value
        filled[name] = _fill_sections(value, (*path, name)) if section and isinstance(value, dict) else value
    return filled


def _split(dotted: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in dotted.split(".")]


def _dotted(parts: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in parts)


def _override(tree: dict[str, Any], text: str) -> tuple[str | int, ...]:
    """Apply one `a.b=c` to the tree in place; returns the path that it set."""
    dotted, equals, value_text = text.partition("=")
    where = f"override {text!r}"
    if not equals or not dotted or any(not part for part in dotted.split(".")):
        raise UserMistake("is not key.path=value", where, "for example optim.lr=1e-6")
    value, _ = parse(value_text, where)
    at: Any = tree
    path: list[str | int] = []
    *parents, last = _split(dotted)
    for part in parents:
        part = _step(at, part, path, where)
        if isinstance(at, dict) and at.get(part) is None:
            at[part] = {}
        at = at[part]
        path.append(part)
    last = _step(at, last, path, where)
    old = at[last] if isinstance(at, list) else at.get(last)
    at[last] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return (*path, last)


def _step(at: Any, part: str | int, path: Sequence[str | int], where: str) -> str | int:
    """Check that `part` leads on from the value `at`, which stands at `path`; returns it as that value wants it."""
    if isinstance(at, dict):
        return str(part)
    if not isinstance(at, list):
        raise UserMistake(f"{_dotted(path)} is {_show(at)} and has no keys of its own", where)
    if not isinstance(part, int) or part >= len(at):
        raise UserMistake(f"{_dotted(path)} is a list of {len(at)} and has no entry {part}", where,
                          f"use a number from 0 to {len(at) - 1}" if at else "give the whole list")
    return part


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def _explain(entry: Any, tree: dict[str, Any], origin: Origin) -> UserMistake:
    """One of pydantic's errors in one line."""
    location = list(entry["loc"])
    found, key = keys.lookup(location)
    if entry["type"] == "extra_forbidden":
        section = keys.section_at(location[:-1])
        siblings = list(section.model_fields) if section else []
        meant = keys.nearest(_dotted(location), siblings)
        remedy = f"did you mean {' or '.join(meant)}?" if meant else f"known here: {', '.join(siblings)}"
        return UserMistake("unknown key", origin.where(location), remedy)
    if entry["type"] == "missing":
        return UserMistake(f"is missing ({key.description})", origin.where(location), f"give {key.expects}")
    value = tree
    for part in found:
        value = value[part]
    if entry["type"] == "too_short":
        return UserMistake("is empty", origin.where(found), f"give at least {entry['ctx']['min_length']} entry")
    below = location[len(found):]
    if isinstance(value, list) and below and isinstance(below[0], int) and below[0] < len(value):
        return UserMistake(f"{_show(value[below[0]])} is not right here", origin.where([*found, below[0]]),
                           f"give {key.expects}")
    expected = key.expects if key else "a mapping"
    return UserMistake(f"{_show(value)} is not {expected}", origin.where(found), _hint(value, expected))


def _hint(value: Any, expected: str) -> str:
    """A remedy where the value shows what was meant."""
    if isinstance(value, str) and expected.startswith("one of "):
        meant = keys.close(value, expected.removeprefix("one of ").removesuffix(" or null").split(", "))
        return f"did you mean {meant}?" if meant else ""
    return ""


def _show(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
