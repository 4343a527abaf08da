"""Where SGLang is. Outside the gate: `bash launch/setup_sglang.sh && bash launch/test.sh tests/sglang`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.config.sglang import installation
from megarl.errors import UserMistake

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The python of launch/setup_sglang.sh's environment."""
    found = str(Path(os.environ.get("MEGARL_SGLANG_VENV", ROOT / ".venv-sglang")).absolute() / "bin" / "python")
    try:
        installation(found)
    except UserMistake as mistake:
        pytest.skip(f"no SGLang here ({mistake.what}): bash launch/setup_sglang.sh makes {found}")
    return found
