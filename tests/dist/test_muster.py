"""Trainers meet before every weight update; where one is missing, all end in time and say which."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import forks
import pytest

from megarl.sync.crew import Crew

SIZE, END_S = 3, 60.0
TIMEOUT_S, LONG_S = 4.0, 90.0  # the latter where nobody may wait for it to run out: it is beyond END_S


def _trainer(folder: str, rank: int, does: str, timeout_s: float) -> None:
    """In a process of its own: muster twice as a program would, the second time so; leave what came of it in a file."""
    import torch.distributed as dist

    from megarl.errors import run_main

    os.environ |= {"MEGARL_RUN_DIR": f"{folder}/run", "RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/meeting", SIZE), rank=rank, world_size=SIZE,
                            timeout=datetime.timedelta(seconds=100))
    crew = Crew(False, 60.0, 60.0, timeout_s)
    crew.muster()
    dist.barrier()
    if does == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({"late": 0.4 * timeout_s, "sleeps": 2 * timeout_s}.get(does, 0.0))
    told = []

    def main(argv: list[str]) -> None:
        try:
            crew.muster()
            told.append(crew.sum(rank))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
            raise

    status = run_main(main, [])
    (Path(folder) / f"told{rank}").write_text(json.dumps([status, told[0]]))
    sys.exit(status)  # in order, as a program ends: nothing may wait for a lost peer then either


def muster(folder: Path, does: list[str], timeout_s: float) -> list[Any]:
    """Have a world of trainers do so; for each [status, what it got or was told], None for one that died."""
    processes = [forks.context().Process(target=_trainer, args=(str(folder), rank, what, timeout_s))
                 for rank, what in enumerate(does)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + END_S
    try:
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"trainer {rank} hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = [path.exists() and json.loads(path.read_text()) for path in
             (folder / f"told{rank}" for rank in range(SIZE))]
    assert [process.exitcode for process in processes] == [one[0] if one else -signal.SIGKILL for one in found]
    return [one or None for one in found]


@pytest.mark.parametrize("does", [["late", "comes", "comes"], ["comes", "late", "comes"]])
def test_all_come(does: list[str], tmp_path: Path):
    assert muster(tmp_path, does, TIMEOUT_S) == [[0, [3]]] * 3
    assert not (tmp_path / "run").exists()


LATE = f"did not come within {TIMEOUT_S:g} s (cluster.timeout_s)"


@pytest.mark.parametrize(("does", "missing"), [
    (["late", "comes", "sleeps"], f"trainer rank 2 {LATE}"),  # trainer 0's time counts from when it comes
    (["comes", "sleeps", "sleeps"], f"trainer ranks 1, 2 {LATE}"),
    (["sleeps", "comes", "comes"], f"trainer rank 0 {LATE}"),
    (["comes", "dies", "comes"], "trainer rank 1 is gone"),
    (["dies", "comes", "comes"], "trainer rank 0 is gone"),
    (["comes", "dies", "sleeps"], f"trainer rank 1 is gone; trainer rank 2 {LATE}"),
], ids=lambda value: "-".join(value) if isinstance(value, list) else "then")
def test_every_trainer_tells_who_is_missing(does: list[str], missing: str, tmp_path: Path):
    """Also one that comes too late. Whoever is gone is missed at once."""
    found = muster(tmp_path, does, TIMEOUT_S if "sleeps" in does else LONG_S)
    told = f"the trainers did not meet to publish weights: {missing}"
    for what, one in zip(does, found, strict=True):
        assert (one is None) == (what == "dies")
        if what in ("comes", "late"):
            assert one == [75, f"MachineFault: {told}"]
        elif what == "sleeps":
            assert one[0] == 75 and one[1].startswith("MachineFault: the trainers did not meet to publish weights: ")
    last = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert last["status"] == 75 and last["message"] == told and does[last["rank"]] in ("comes", "late")
