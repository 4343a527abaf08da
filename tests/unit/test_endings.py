"""What a run says where it ends or refuses to begin: remedies, the step's number, the last sign of life."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.checkpoint.state import Checkpoints
from megarl.data.buffer import ExperienceBuffer
from megarl.errors import MachineFault, UserMistake
from megarl.launch import _failure
from megarl.observe.heartbeat import Heartbeat
from megarl.trainer import Trainer


def test_a_changed_config_has_three_ways_out(tmp_path: Path):
    saved = {"format": 2, "identity": {}, "settings": {"optim": {"lr": 1e-3}}}
    checkpoints = Checkpoints(tmp_path, 1, None, {}, {"optim": {"lr": 2e-3}}, fixed=lambda key: True)
    with pytest.raises(UserMistake) as caught:
        checkpoints._refuse_another_run(tmp_path / "step_00000003", saved)
    assert str(caught.value) == (
        f"{tmp_path / 'step_00000003'}: the run would go on by other rules: optim.lr was 0.001, is 0.002\n"
        "  remedy: change the config back, set checkpoint.allow_changes: true, or give another run.dir")


@pytest.mark.parametrize(("code", "told"), [
    (-9, "rank 2 was killed by SIGKILL, most often by the system for want of memory (dmesg tells)\n"
         "  remedy: the same command goes on from the newest checkpoint; if memory was short, use less or give more"),
    (-11, "rank 2 was killed by SIGSEGV\n  remedy: the same command goes on from the newest checkpoint"),
    (-40, "rank 2 was killed by signal 40\n  remedy: the same command goes on from the newest checkpoint"),
    (3, "rank 2 ended with exit code 3 without telling why"),
])
def test_the_end_of_a_rank_that_told_nothing(tmp_path: Path, code: int, told: str):
    (tmp_path / "torchrun.log").write_text(
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-01-01_00:00:00\n  host      : here\n"
        f"  rank      : 2 (local_rank: 2)\n  exitcode  : {code} (pid: 7)\n")
    failed = _failure(tmp_path, tmp_path, SimpleNamespace(rank=0))
    assert str(failed) == f"{told}\n  logs: {tmp_path}" and failed.status == 75


def test_the_end_of_a_run_whose_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also with an empty log: nothing could be written to it."""
    (tmp_path / "torchrun.log").touch()
    monkeypatch.setattr("megarl.launch.shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    failed = _failure(tmp_path, tmp_path, SimpleNamespace(rank=0))
    assert str(failed) == (
        f"no room is left in {tmp_path}: what failed could not be written down there\n"
        f"  remedy: make room; the same command goes on from the newest checkpoint\n  logs: {tmp_path}")
    assert failed.status == 75


def taken(monkeypatch: pytest.MonkeyPatch, problems: str) -> str:
    """What is told of the first step if it has no sample."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda told, **_: None)
    monkeypatch.setattr("megarl.data.buffer.gather_table", lambda local, groups: [])
    monkeypatch.setattr("megarl.data.buffer._problems", lambda reports: problems)
    monkeypatch.setattr("megarl.data.buffer.SampleBatch.from_groups", lambda groups: SimpleNamespace(
        select=lambda rows: SimpleNamespace(), rewards=[]))
    buffer = ExperienceBuffer(lambda numbers: SimpleNamespace(groups=[], reports=[]), lambda step: SimpleNamespace(
        stops=False, numbers=[], ahead=0, dropped=3, waited_s={}), SimpleNamespace(), [], 0)
    monkeypatch.setattr(buffer, "_refuse_old", lambda step, local: None)
    monkeypatch.setattr(buffer, "_measure", lambda collected: {})
    with pytest.raises((UserMistake, MachineFault)) as caught:
        buffer.take(0)
    return str(caught.value)


def test_a_step_without_samples_has_the_number_of_its_metrics(monkeypatch: pytest.MonkeyPatch):
    told = taken(monkeypatch, "mine raised 8 times")
    assert told == ("reward.terms: no sample of step 1 has a reward\nmine raised 8 times\n  remedy: correct the reward "
                    "function, or set reward.on_error: value and reward.error_value")
    assert taken(monkeypatch, "").startswith("no sample of step 1 can be trained on: 3 groups were dropped")


@pytest.mark.parametrize(("done", "phase"), [(4, "finished"), (3, "stopped")])
def test_the_last_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, phase: str):
    def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat("evaluate")
    heartbeat.step = done
    trainer = SimpleNamespace(
        settle=nothing, due=lambda every: True, progress=SimpleNamespace(step=done), run_dir=tmp_path,
        report=SimpleNamespace(say=nothing, draw=nothing, heartbeat=heartbeat),
        checkpoints=SimpleNamespace(finish=nothing), source=SimpleNamespace(sampling=None),
        config=SimpleNamespace(run=SimpleNamespace(steps=4), checkpoint=SimpleNamespace(every=1, export=False)))
    trainer.stop = lambda: Trainer.stop(trainer)
    Trainer.finish(trainer)
    told = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (told["step"], told["phase"]) == (done, phase)
