"""The launcher: one error, its status, and no process left, however the ranks end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from good_config import write_good

HERE = Path(__file__).parent
CHANGES = ["cluster.trainers=1", "parallel.expert=1"]


def start(folder: Path, end: str, **environ: str) -> subprocess.Popen[str]:
    """The launcher on the good config with two ranks that end as `end` says."""
    path = str(folder / "config.yaml")
    environ = {**os.environ, "MEGARL_PROGRAM": "fake_ranks", "FAKE_END": end,
               "PYTHONPATH": f"{HERE}:{HERE.parent.parent}", **environ}
    return subprocess.Popen([sys.executable, "-m", "megarl.launch", path, *CHANGES], env=environ, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def alive(folder: Path) -> list[int]:
    """Which of the processes that rank 0 wrote down still run (a zombie does not); a killed one gets 5 s to go."""
    for _ in range(50):
        running = []
        for pid in (folder / "run" / "pids").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    running.append(int(pid))
        if not running:
            break
        time.sleep(0.1)
    return running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch")
    write_good(path)
    return path


@pytest.mark.parametrize(("end", "status", "told"), [
    ("mistake", 64, "error: rank 1: some.key: 7 is too much\n  remedy: use 6\n"),
    ("bug", 1, "error: rank 1: ValueError: this should not happen; traceback in "),
    ("killed", 75, "error: rank 1 was killed by SIGKILL, most often by the system for want of memory (dmesg tells)\n"
                   "  remedy: the same command goes on from the newest checkpoint"),
])
def test_a_failure_is_told_once(folder: Path, end: str, status: int, told: str) -> None:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "pids").unlink(missing_ok=True)
    (run / "exit.json").write_text('{"status": 64, "message": "of an earlier life", "rank": 0}')
    process = start(folder, end)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert err.startswith(told) and len(err.splitlines()) <= 3
    assert f"rank 0 is here {folder / 'config.yaml'} {' '.join(CHANGES)}\n" in out and "rank 1" not in out
    assert alive(folder) == []
    if end == "bug":
        log = Path(err.splitlines()[0].rpartition("traceback in ")[2])
        assert "ValueError: this should not happen\nsecond line" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    pids = folder / "run" / "pids"
    pids.unlink(missing_ok=True)
    process = start(folder, "hang")
    while not (pids.exists() and pids.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and alive(folder) == []
    assert err == "interrupted; the same command goes on from the newest checkpoint\n"
    assert not (folder / "run" / "exit.json").exists()


def test_a_run_has_its_directory_for_itself(folder: Path) -> None:
    pids = folder / "run" / "pids"
    pids.unlink(missing_ok=True)
    first = start(folder, "hang")
    while not (pids.exists() and pids.read_text()):
        assert first.poll() is None
        time.sleep(0.05)
    second = start(folder, "hang")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 64 and err.startswith("error: run.dir: another run is using ")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130 and alive(folder) == []
