"""Checks of environments: their code, who names them, and what their credit can be combined with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.errors import UserMistake


def check(config: Config) -> Iterator[UserMistake]:
    """Mistakes in `environments`, and in the sources that name them."""
    from megarl.rollout.environments import load  # light, and above this package

    names = Counter(entry.name for entry in config.environments)
    for number, entry in enumerate(config.environments):
        where = f"environments.{number}"
        if names[entry.name] > 1:
            yield UserMistake(f"{names[entry.name]} environments are named {entry.name!r}", f"{where}.name",
                              "give each its own name")
        try:
            load.bind(entry, where)
        except UserMistake as mistake:
            yield mistake
        if entry.credit == "turn":
            yield from _credit(config, where)
    own = {name for name, environment, _ in load.sources(config)} - {*load.scored_by_terms(config)}
    for number, term in enumerate(config.reward.terms):
        if term.source in own:
            yield UserMistake(f"the environment of {term.source!r} gives its reward: this term would not be used",
                              f"reward.terms.{number}.source",
                              "set reward_terms: true in the environment, or remove the term")
    chosen: dict[str, str] = {}
    for name, environment, where in load.sources(config):
        if environment and environment not in names:
            yield UserMistake(f"there is no environment {environment!r}", where,
                              f"known are {', '.join(names)}" if names else "describe it under environments")
        if chosen.setdefault(name, environment) != environment:
            yield UserMistake(f"{name!r} is also the name of a source with environment {chosen[name]!r}", where,
                              "give both the same environment, or other names")


def _credit(config: Config, where: str) -> Iterator[UserMistake]:
    """A turn's advantage is computed where its group was sampled, from its rewards alone."""
    objective = config.objective
    for wrong, key in ((objective.std_over == "task", "objective.std_over: group"),
                       (objective.kl.coefficient > 0 and objective.kl.place == "reward", "objective.kl.place: loss"),
                       (objective.overlong_buffer > 0, "objective.overlong_buffer: 0"),
                       (config.reward.on_error == "value", "reward.on_error: drop")):
        if wrong:
            yield UserMistake("the credit of turns knows nothing of what another key adds to the reward",
                              f"{where}.credit", f"use episode, or set {key}")
