"""Pins and ranges of the heavy packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from megarl import versions
from megarl.errors import UserMistake


def test_the_pins_lie_in_the_ranges_and_are_what_runs_here() -> None:
    for package, pin in versions.CPU.items():
        assert pin in SpecifierSet(versions.RANGES[package])
    versions.check()


@pytest.mark.parametrize(("name", "found", "told"), [
    ("megatron-core", "0.17.0", "environment: megatron-core 0.17.0 is not >=0.16.1,<0.17"),
    ("megatron-core", None, "environment: the package megatron-core is not installed"),
    ("transformer-engine", "2.12.0", "environment: transformer-engine 2.12.0 is not >=2.9,<2.12"),
])
def test_others_are_refused(name: str, found: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    wanted = (versions.RANGES | versions.IF_INSTALLED)[name]

    def version(package: str) -> str:
        if package != name:
            return real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserMistake) as caught:
        versions.check()
    assert caught.value.line() == told + f"; run bash launch/setup.sh, or: pip install '{name}{wanted}'"


@pytest.mark.parametrize(("place", "kind", "told"), [
    (None, "none", "NVIDIA apex is not installed"),
    ("apex", "unrelated", "the package apex here is not NVIDIA's"),
    ("apex/multi_tensor_apply", "nvidia", ""),
])
def test_apex_is_told_from_its_namesake(place: str | None, kind: str, told: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    if place is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('looked at, never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions.apex() == kind
    versions.check()
    if not told:
        versions.check(require_apex=True)
        return
    with pytest.raises(UserMistake, match=f"run.require_apex: {told}"):
        versions.check(require_apex=True)
