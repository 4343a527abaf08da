"""How the end of a program becomes a status and one message."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.errors import MachineFault, UserMistake, UserMistakes, run_main, write_exit


def ends_with(error: BaseException) -> Callable[[list[str]], None]:
    def main(argv: list[str]) -> None:
        raise error
    return main


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGARL_RUN_DIR", raising=False)


@pytest.mark.parametrize(("error", "status", "told"), [
    (UserMistake("7 is too much", "a.b", "use 6"), 64, "error: a.b: 7 is too much\n  remedy: use 6\n"),
    (UserMistakes([UserMistake("x", "a", "y"), UserMistake("z")]), 64, "error: 2 mistakes:\n  a: x; y\n  z\n"),
    (UserMistakes([UserMistake("x", "a", "y")]), 64, "error: a: x; y\n"),
    (MachineFault("engine 3 is dead"), 75, "error: engine 3 is dead\n"),
    (TimeoutError("no answer"), 75, "error: TimeoutError: no answer\n"),
    # as torch 2.13 says it when a peer dies
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer\nx"),
     75, "error: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset "
     "by peer\n"),
    (ValueError("first line\nsecond"), 1, "error: ValueError: first line\n"),
    (AssertionError(), 1, "error: AssertionError: \n"),
    (ModuleNotFoundError("No module named 'x'", name="x"), 64,
     "error: the package x is not installed\n  remedy: run: bash launch/setup.sh\n"),
    (ModuleNotFoundError("No module named 'megarl.x'", name="megarl.x"), 1,
     "error: ModuleNotFoundError: No module named 'megarl.x'\n"),
])
def test_status_and_message(error: Exception, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(ends_with(error), []) == status
    assert capsys.readouterr().err.endswith(told)


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(lambda argv: None, []) == 0
    assert run_main(ends_with(KeyboardInterrupt()), []) == 130
    assert run_main(ends_with(SystemExit(2)), []) == 64
    with pytest.raises(SystemExit):
        run_main(ends_with(SystemExit(0)), [])
    assert capsys.readouterr().err == ""


def test_only_the_first_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MEGARL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RANK", "3")
    assert run_main(ends_with(UserMistake("the cause")), []) == 64
    assert run_main(ends_with(ConnectionError("its consequence")), []) == 75
    assert json.loads((tmp_path / "run" / "exit.json").read_text()) == {"status": 64, "message": "the cause", "rank": 3}
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert told == ["error: the cause"]
    assert not write_exit(tmp_path / "run", 1, "late")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["exit.json"]


def test_torchs_errors(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert "torch" in sys.modules
    assert run_main(ends_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), []) == 64
    assert "error: CUDA out of memory. Tried to allocate 2 GiB\n  remedy: lower batch" in capsys.readouterr().err
    assert run_main(ends_with(torch.AcceleratorError("uncorrectable ECC error encountered")), []) == 75
    assert run_main(ends_with(torch.distributed.DistBackendError("NCCL")), []) == 75
    assert run_main(ends_with(torch.distributed.DistStoreError("wait timeout")), []) == 75


def test_a_mistake_replaces_the_fault_that_it_caused(tmp_path: Path) -> None:
    """A rank that lost a peer may tell so before the peer has told why."""
    for status, kept in ((75, 75), (75, 75), (64, 64), (64, 64), (75, 64), (1, 64)):
        before = (tmp_path / "exit.json").exists() and (tmp_path / "exit.json").read_text()
        wrote = write_exit(tmp_path, status, f"{status}")
        assert json.loads((tmp_path / "exit.json").read_text())["status"] == kept
        assert wrote == ((tmp_path / "exit.json").read_text() != before)
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]
