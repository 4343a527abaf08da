"""Pins and ranges of the heavy packages."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.specifiers import SpecifierSet

from megarl import versions
from megarl.errors import UserMistake


def test_the_pins_lie_in_the_ranges_and_are_what_runs_here() -> None:
    for package, pin in versions.CPU.items():
        assert pin in SpecifierSet(versions.RANGES[package])
    versions.check()


@pytest.mark.parametrize(("found", "told"), [
    ("0.17.0", "environment: megatron-core 0.17.0 is not >=0.16.1,<0.17"),
    (None, "environment: the package megatron-core is not installed"),
])
def test_others_are_refused(found: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package != "megatron-core":
            return real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserMistake) as caught:
        versions.check()
    assert caught.value.line() == told + "; run bash launch/setup.sh, or: pip install 'megatron-core>=0.16.1,<0.17'"
