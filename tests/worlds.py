"""Run a function in a world of several gloo processes, with Megatron-core on CPU."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forks


def run_world(size: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Call `function(rank, *args)` in `size` processes with torch.distributed (gloo) set up; return their results.

    The function must be importable by module and name. Arguments and results travel by pickle. Each process runs one
    thread. If a rank fails, all are killed and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-world-") as folder:
        module = sys.modules[function.__module__]
        (Path(folder) / "call").write_bytes(pickle.dumps((str(Path(module.__file__).resolve()), function.__qualname__)))
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        processes = [forks.context().Process(target=_child, args=(folder, rank, size)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(size)]


def _wait(processes: list[BaseProcess], folder: Path, timeout: float) -> None:
    """Until all have ended well; raises AssertionError with the first failing rank's log."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.exitcode for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed or time.monotonic() > deadline:
            time.sleep(0.5 if failed else 0)
            rank = failed[0] if failed else codes.index(None)
            why = f"ended with {codes[rank]}" if failed else f"still running after {timeout:.0f} s"
            raise AssertionError(f"rank {rank} {why}:\n{(folder / f'log{rank}').read_text()[-6000:]}")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _child(folder: str, rank: int, size: int) -> None:
    import datetime
    import importlib.util

    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch

    from megarl.cluster import device

    torch.set_num_threads(1)
    device.prepare("cpu")
    path, name = pickle.loads((Path(folder) / "call").read_bytes())
    meeting = torch.distributed.FileStore(f"{folder}/meeting", size)  # no port to clash over
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size,
                                         timeout=datetime.timedelta(seconds=120))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    args = pickle.loads((Path(folder) / "args").read_bytes())  # may hold classes of that module
    result = getattr(module, name)(rank, *args)
    (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

