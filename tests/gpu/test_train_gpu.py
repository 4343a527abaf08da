"""The real loop, its trainer on a GPU and its engine on the CPU: publishing, checksums, the gap, saving, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.test_train import launch, metrics
from good_config import write_files


@pytest.mark.parametrize("dtype, gap", [("fp32", 1e-5), ("bf16", 5e-2)])
def test_the_loop(where: str, tmp_path: Path, dtype: str, gap: float) -> None:
    """`sync.verify` compares every tensor that the GPU sent with what the engine holds. The mean gap of log-probs in
    bf16 is a few of its steps, 2^-8 of logits of about 3."""
    write_files(tmp_path)
    one_trainer = ("cluster.trainers=1", "parallel.expert=1", f"cluster.device={where}", f"model.dtype={dtype}",
                   "data.prompts_per_step=8")
    launch(tmp_path, "run", *one_trainer, "run.steps=2")
    launch(tmp_path, "run", *one_trainer, "run.steps=3")
    steps = metrics(tmp_path, "run")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert all(0 < step["engine/gap_mean"] < gap for step in steps[1:])
    assert list((tmp_path / "run" / "export").glob("*.safetensors"))
