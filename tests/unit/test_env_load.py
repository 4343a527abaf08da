"""Environments named in the config: found, checked, refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.environments import check
from megarl.config.schema import Config, EnvironmentConfig
from megarl.errors import UserMistake
from megarl.rollout.environments.load import bind, bind_all, scored_by_terms

CODE = """
from dataclasses import dataclass

@dataclass
class World:
    size: int = 3
    name: str = "w"
    async def reset(self, task): ...
    async def step(self, action): ...

class Half:
    async def reset(self, task): ...
    def step(self, action): ...

async def run(client, task, *, depth: float): ...
def factory(size=1): return World(size)
VALUE = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "my world.py"
    path.write_text(CODE)
    return str(path)


def told(source: str, options: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserMistake) as mistake:
        bind(EnvironmentConfig(name="w", source=source, options=options or {}), "environments.0")
    return mistake.value.line()


def test_classes_factories_and_functions(code: str) -> None:
    world = bind(EnvironmentConfig(name="w", source=f"{code}:World", options={"size": "4"}))
    assert not world.plain and world.options == {"size": 4} and world.code(**world.options).size == 4
    assert not bind(EnvironmentConfig(name="w", source=f"{code}:factory")).plain
    run = bind(EnvironmentConfig(name="w", source=f"{code}:run", options={"depth": 2}))
    assert run.plain and run.options == {"depth": 2.0}
    assert bind(EnvironmentConfig(name="w", source=f"{code}:World")).code is world.code  # the file was run once
    assert bind(EnvironmentConfig(name="w", source="calculator", options={"per_call": -0.1})).code().tools


def test_what_is_wrong_is_told_with_a_remedy(code: str) -> None:
    assert told("calculater").startswith("environments.0.source: unknown environment 'calculater'; give module:name")
    assert "cannot import 'no_such_module'" in told("no_such_module:run")
    assert "cannot import" in told("/no/such/file.py:run")
    assert "has no function 'Wrld'; did you mean World" in told(f"{code}:Wrld")
    assert "has no function 'VALUE'" in told(f"{code}:VALUE")
    assert "has no method `async def step`; see docs/environments.md" in told(f"{code}:Half")
    assert "has no option 'sise'; did you mean size?" in told(f"{code}:World", {"sise": 3})
    assert "environments.0.options.size: 'many' does not fit int" in told(f"{code}:World", {"size": "many"})
    line = told(f"{code}:run")
    assert "cannot be called: missing a required" in line and "run(client, task, **options)" in line


def config_of(environments: list[dict[str, Any]], sources: list[dict[str, Any]], sets: list[dict[str, Any]] = (),
              **more: Any) -> Config:
    return Config.model_validate({
        "model": {"path": "m"}, "environments": environments, "eval": {"sets": list(sets)},
        "data": {"sources": [{"path": "a.jsonl", **source} for source in sources]}, **more})


def lines(config: Config) -> list[str]:
    return [mistake.line() for mistake in check(config)]


CALC = {"name": "calc", "source": "calculator"}


def test_sources_and_their_environments() -> None:
    config = config_of([CALC], [{"name": "one", "environment": "calc"}, {"name": "two"}],
                       [{"path": "b.jsonl", "environment": "calc"}])
    assert lines(config) == [] and set(bind_all(config)) == {"one", "b"}
    assert scored_by_terms(config) == ["two"]
    both = config_of([{**CALC, "reward_terms": True}], [{"environment": "calc"}])
    assert scored_by_terms(both) == ["a"]
    idle = config_of([CALC], [{"environment": "calc"}], reward={"terms": [{"name": "exact", "source": "a"}]})
    assert "the environment of 'a' gives its reward" in lines(idle)[0] and len(lines(idle)) == 1
    (line,) = lines(config_of([CALC], [{"environment": "calk"}]))
    assert line == "data.sources.0.environment: there is no environment 'calk'; known are calc"
    with pytest.raises(UserMistake, match="there is no environment 'calk'"):
        bind_all(config_of([CALC], [{"environment": "calk"}]))
    (line,) = lines(config_of([CALC], [{"environment": "calc"}], [{"path": "a.jsonl"}]))
    assert line.startswith("eval.sets.0.environment: 'a' is also the name of a source with environment 'calc'")
    assert len(lines(config_of([CALC, CALC], [{}]))) == 2


def test_the_embedded_engine_keeps_turns_where_there_are_environments() -> None:
    from megarl.rollout.process import engine_command

    with_one, without = (engine_command(config_of(environments, [{}]), 0, 0, "h", 1, "v")
                         for environments in ([CALC], []))
    assert with_one[with_one.index("--prefix-tokens") + 1] == "16384" and "--prefix-tokens" not in without


@pytest.mark.parametrize("more, key", [
    ({"objective": {"std_over": "task"}}, "std_over: group"),
    ({"objective": {"kl": {"coefficient": 0.1, "place": "reward"}}}, "kl.place: loss"),
    ({"objective": {"overlong_buffer": 4}}, "overlong_buffer: 0"),
    ({"reward": {"on_error": "value", "error_value": 0.0}}, "on_error: drop")])
def test_credit_by_turns_and_what_it_does_not_know(more: dict[str, Any], key: str) -> None:
    turn = {**CALC, "credit": "turn"}
    assert lines(config_of([turn], [{"environment": "calc"}])) == []
    (line,) = lines(config_of([turn], [{"environment": "calc"}], **more))
    assert line.startswith("environments.0.credit: ") and key in line
    assert lines(config_of([CALC], [{"environment": "calc"}], **more)) == []
