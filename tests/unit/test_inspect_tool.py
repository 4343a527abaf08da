"""What tools/inspect_checkpoint.py prints where nobody looks at it in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from good_config import write_good
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]


def test_names_are_whole_in_a_pipe(tmp_path: Path):
    name = "model.layers.0." + "very_long_name." * 12 + "weight"
    write_good(tmp_path)
    save_file({name: np.zeros((2, 3), np.float32)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for path in (tmp_path / "model").glob("model*-*"):
        path.unlink()
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    done = subprocess.run([sys.executable, ROOT / "tools/inspect_checkpoint.py", tmp_path / "model", "--tensors"],
                          capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "very_long" in line]
    assert name in line and "2 x 3" in line and max(map(len, done.stdout.splitlines())) < 2 * len(name)
