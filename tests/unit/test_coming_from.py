"""docs/coming_from.md: every key of ours that it names exists, and every value given with one is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from megarl.config import keys
from megarl.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
KNOWN = {key.path for key in keys.walk()}


def cells() -> list[tuple[str, str]]:
    """(key, value or "") of everything in backticks in the second column of a table that is a key of ours."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            for text in re.findall(r"`([^`]+)`", line.split(" | ")[1]):
                name, _, value = text.partition(": ")
                if re.fullmatch(r"[a-z_.\[\]]+", name):
                    found.append((name, value))
    return found


# in that column and no key: parameters of functions, options of the server, files
OTHERS = {"reset", "step", "tp_size"}


def test_the_page_is_read():
    assert len(cells()) > 120 and ("objective.proximal", "behaviour") in cells()


@pytest.mark.parametrize("name, value", sorted(set(cells())))
def test_the_key_exists_and_takes_the_value(name: str, value: str):
    if name in OTHERS:
        return
    assert name in KNOWN, f"{name} is no key"
    if value:
        model = Config
        *sections, last = name.split(".")
        for section in sections:
            model = model.model_fields[section].annotation
        field = model.model_fields[last]
        TypeAdapter(field.annotation).validate_python(yaml.safe_load(value), strict=True)


def test_page_and_schema_name_the_asynchronous_and_off_policy_keys():
    """Those that newcomers look for first are all there."""
    named = {name for name, _ in cells()}
    assert {"rollout.max_lag", "rollout.ahead", "rollout.on_update", "objective.proximal", "objective.correction.kind",
            "objective.correction.reject", "objective.gap_alarm.threshold", "debug.replay_experience",
            "debug.dump_experience", "debug.rollout_only", "moe.replay", "sync.transport"} <= named
