"""Where SGLang is. Outside the gate: `bash launch/setup_sglang.sh && bash launch/test.sh tests/sglang`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.config.sglang import installation
from megarl.errors import UserMistake

FOLDER = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("MEGARL_SGLANG_VENV", FOLDER.parents[1] / ".venv-sglang")).absolute() / "bin" / "python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here are skipped, with one line, where there is no SGLang."""
    try:
        installation(str(PYTHON))
    except UserMistake as mistake:
        skip = pytest.mark.skip(reason=f"no SGLang here ({mistake.what}); bash launch/setup_sglang.sh makes it")
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The python of launch/setup_sglang.sh's environment."""
    return str(PYTHON)
