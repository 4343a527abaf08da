"""Reward functions by name: the registry, `module:function`, and the checks made before a run starts.

A reward function is `f(response: str, label, prompt: PromptView, **options) -> float`, plain or async. This module is
imported by the reward workers and stays light: no torch, no megatron, no verifier library.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import UserMistake


@dataclass(frozen=True)
class PromptView:
    """What a reward function sees of a prompt and of how it was answered.

    Attributes:
        text: the prompt as in the data: text, or a list of chat messages.
        source: name of the data source.
        extra: the row's other columns.
        response_tokens: length of the response in tokens.
        finish: why it ended: "stop", "length" or "abort".
    """

    text: Any = ""
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    response_tokens: int = 0
    finish: str = "stop"


@dataclass(frozen=True)
class Term:
    """One term of the weighted sum, as `config.schema.RewardTerm` without pydantic."""

    name: str
    weight: float = 1.0
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A registered function: the packages that it imports (module -> what pip installs) and a check of its options."""

    function: Callable[..., Any]
    packages: dict[str, str] = field(default_factory=dict)
    check: Callable[..., None] | None = None


_registry: dict[str, Entry] = {}


def reward(name: str, *, packages: dict[str, str] | None = None,
           check: Callable[..., None] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a reward function under `name`.

    Args:
        packages: modules that the function imports when called, each with its name for pip. They are imported when a
            worker starts, so that no sample pays for it.
        check: called once at start with the function's options; raises ValueError if they make no sense together.
    """
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in _registry:
            raise ValueError(f"reward function {name!r} is registered twice")
        _registry[name] = Entry(function, packages or {}, check)
        return function

    return register


def names() -> list[str]:
    """The registered names, sorted."""
    importlib.import_module("megarl.reward.functions")
    return sorted(_registry)


def lookup(name: str, where: str = "reward.terms") -> Entry:
    """The function registered as `name`, or `module:function` imported.

    Raises:
        UserMistake: there is no such function; the nearest names are in the remedy.
    """
    if ":" in name:
        function = import_object(name, where)
        registered = [entry for entry in _registry.values() if entry.function is function]
        return registered[0] if registered else Entry(function)
    if name not in names():
        remedy = _suggest(name, names()) + " (or give module:function)"
        raise UserMistake(f"unknown reward function {name!r}", where, remedy)
    return _registry[name]


def import_object(name: str, where: str) -> Callable[..., Any]:
    """The callable that `module:attribute` or `path/to/file.py:attribute` names.

    Raises:
        UserMistake: it cannot be imported, or there is no such callable; the nearest names are in the remedy.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        module = _module_of(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise UserMistake(f"cannot import {module_name!r}: {type(error).__name__}: {error}", where,
                          "put its folder on PYTHONPATH, and import it once by hand to see its errors") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserMistake(f"{module_name!r} has no function {attribute!r}", where, _suggest(attribute, there))
    return function


def _module_of(path: Path) -> types.ModuleType:
    """A file as a module, imported once, under a name of its own so that it hides no other."""
    name = f"megarl_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before its code runs: dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _suggest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"


def bind(term: Term, where: str = "reward.terms") -> Callable[[str, Any, PromptView], Any]:
    """The function of a term with its packages imported and its options checked and filled in.

    Options are validated against the annotations of the function ("0.1" for a float becomes 0.1).

    Raises:
        UserMistake: unknown function, missing package, or an option that is unknown, missing or of the wrong type.
    """
    entry = lookup(term.name, f"{where}.name")
    for module, requirement in entry.packages.items():
        if importlib.util.find_spec(module) is None:
            raise UserMistake(f"reward function {term.name!r} needs the package {module}", f"{where}.name",
                              f"pip install {requirement}")
        importlib.import_module(module)
    options = check_options(f"reward function {term.name!r}", entry.function, term.options, f"{where}.options", 3,
                            "f(response, label, prompt, **options)")
    if entry.check is not None:
        try:
            entry.check(**options)
        except ValueError as error:
            remedy = f"see the options of reward function {term.name!r}"
            raise UserMistake(str(error), f"{where}.options", remedy) from error
    return functools.partial(entry.function, **options)


def check_options(what: str, function: Callable[..., Any], options: dict[str, Any], where: str, given: int,
                  form: str) -> dict[str, Any]:
    """The options as the annotations of the function have them.

    Args:
        what: the function, for messages.
        given: arguments that come before the options.
        form: how it is called, for messages.
    Raises:
        UserMistake: an option is unknown, missing or of the wrong type.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    accepted = [p.name for p in parameters[given:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in accepted:
                remedy = _suggest(option, accepted) if accepted else "it takes no options"
                raise UserMistake(f"{what} has no option {option!r}", where, remedy)
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        raise UserMistake(f"{what} cannot be called: {error}", where,
                          f"its signature must be {form} with every option given or defaulted") from error
    hints = _hints(function) if options else {}
    return {option: _validated(value, hints[option], f"{where}.{option}") if option in hints else value
            for option, value in options.items()}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Evaluated annotations; none where they cannot be evaluated (imported for type checkers only, or no function)."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def _validated(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation has it ("0.1" becomes 0.1 for a float)."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(hint, config={"arbitrary_types_allowed": True})
    except PydanticUserError:  # a model or dataclass, which has its own config
        adapter = TypeAdapter(hint)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        shown = hint.__name__ if isinstance(hint, type) else hint
        raise UserMistake(f"{value!r} does not fit {shown}", where, problem) from error


def term_keys(terms: Sequence[Term]) -> list[str]:
    """One key per term for `Sample.reward_terms`: its name, with `#2`, `#3` for later terms of the same name."""
    seen: Counter[str] = Counter()
    keys = []
    for term in terms:
        seen[term.name] += 1
        keys.append(term.name if seen[term.name] == 1 else f"{term.name}#{seen[term.name]}")
    return keys


def check_terms(terms: Sequence[Term], sources: Sequence[str] = ()) -> None:
    """Check, in this process, all that a worker checks when it starts; and that each data source has a term.

    Raises:
        UserMistake: as `bind`; or a source without a term, or a term for a source that does not exist.
    """
    for number, term in enumerate(terms):
        bind(term, f"reward.terms.{number}")
        if sources and term.source and term.source not in sources:
            raise UserMistake(f"there is no data source {term.source!r}", f"reward.terms.{number}.source",
                              _suggest(term.source, sources))
    for source in sources:
        if not any(term.source in ("", source) for term in terms):
            raise UserMistake(f"no reward term applies to the data source {source!r}", "reward.terms",
                              f"add a term with source: {source}, or one without a source")
