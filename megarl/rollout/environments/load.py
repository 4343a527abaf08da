"""From the name of an environment in the config to the user's code, checked before a run starts. Light; no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake
from megarl.reward.registry import check_options, import_object

if TYPE_CHECKING:
    from megarl.config.schema import Config, EnvironmentConfig

REGISTERED = {
    "calculator": "megarl.examples.calculator_task:Calculator", "search": "megarl.examples.search_task:Search",
    "program": "megarl.rollout.environments.program:run"}


@dataclass(frozen=True)
class Bound:
    """An environment of the config with its code.

    Attributes:
        config: its section.
        code: makes an object (`protocol.Environment`) from the options; or, if `plain`, an async function
            `run(client, task, **options)`.
        options: validated against the annotations.
        plain: whether it is a function.
    """

    config: EnvironmentConfig
    code: Callable[..., Any]
    options: dict[str, Any]
    plain: bool


def bind(config: EnvironmentConfig, where: str = "environments") -> Bound:
    """Import an environment and check that it can be called with its options.

    Raises:
        UserMistake: it cannot be imported, is nothing of the kind, or has other options.
    """
    source = REGISTERED.get(config.source, config.source)
    if ":" not in source:
        raise UserMistake(f"unknown environment {config.source!r}", f"{where}.source",
                          f"give module:name or file.py:name, or one of {', '.join(REGISTERED)}")
    code = import_object(source, f"{where}.source")
    plain = inspect.iscoroutinefunction(code)
    what = f"environment {config.source!r}"
    if inspect.isclass(code):
        for method in ("reset", "step"):
            if not inspect.iscoroutinefunction(getattr(code, method, None)):
                raise UserMistake(f"{what} has no method `async def {method}`", f"{where}.source",
                                  "see docs/environments.md for what an environment is")
    signature = "run(client, task, **options)" if plain else "a class or factory called with the options alone"
    options = check_options(what, code, config.options, f"{where}.options", 2 if plain else 0, signature)
    return Bound(config, code, options, plain)


def bind_all(config: Config) -> dict[str, Bound]:
    """Name of a data source or of an evaluation set -> its environment; those of single-turn prompts are left out.

    Raises:
        UserMistake: as `bind`; or a source names an environment that is not there.
    """
    bound = {entry.name: bind(entry, f"environments.{number}") for number, entry in enumerate(config.environments)}
    return {source: bound[environment] for source, environment, where in sources(config)
            if environment and _known(environment, bound, where)}


def _known(environment: str, bound: dict[str, Bound], where: str) -> bool:
    if environment not in bound:
        raise UserMistake(f"there is no environment {environment!r}", where,
                          f"known are {', '.join(bound)}" if bound else "describe it under environments")
    return True


def sources(config: Config) -> Sequence[tuple[str, str, str]]:
    """(name, environment or "", key of that) of every data source and evaluation set."""
    from pathlib import Path

    return [(entry.name or Path(entry.path).stem, entry.environment, f"{section}.{number}.environment")
            for section, entries in (("data.sources", config.data.sources), ("eval.sets", config.eval.sets))
            for number, entry in enumerate(entries)]


def scored_by_terms(config: Config) -> list[str]:
    """Names of the sources whose samples reward.terms score: single-turn ones, and where an environment says so."""
    by_terms = {entry.name for entry in config.environments if entry.reward_terms}
    return [name for name, environment, _ in sources(config) if not environment or environment in by_terms]
