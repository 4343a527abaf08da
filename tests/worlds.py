"""Run a function in a world of several gloo processes, with Megatron-core on CPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_world(size: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Call `function(rank, *args)` in `size` processes with torch.distributed (gloo) set up; return their results.

    The function must be importable by module and name. Arguments and results travel by pickle. Each process runs one
    thread. If a rank fails, all are killed and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-world-") as folder:
        module = sys.modules[function.__module__]
        (Path(folder) / "call").write_bytes(pickle.dumps((str(Path(module.__file__).resolve()), function.__qualname__)))
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size),
               "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        logs = [open(Path(folder) / f"log{rank}", "w+") for rank in range(size)]
        processes = [subprocess.Popen([sys.executable, __file__, folder], env={**env, "RANK": str(rank)},
                                      stdout=logs[rank], stderr=subprocess.STDOUT) for rank in range(size)]
        try:
            _wait(processes, logs, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(size)]


def _wait(processes: list[subprocess.Popen], logs: list, timeout: float) -> None:
    """Until all have ended well; raises AssertionError with the first failing rank's log."""
    import time

    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed or time.monotonic() > deadline:
            time.sleep(0.5 if failed else 0)
            rank = failed[0] if failed else codes.index(None)
            logs[rank].flush()
            logs[rank].seek(0)
            why = f"ended with {codes[rank]}" if failed else f"still running after {timeout:.0f} s"
            raise AssertionError(f"rank {rank} {why}:\n{logs[rank].read()[-6000:]}")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _child(folder: str) -> None:
    import datetime
    import importlib.util

    path, name = pickle.loads((Path(folder) / "call").read_bytes())
    import torch

    from megarl.cluster import device

    torch.set_num_threads(1)
    device.prepare("cpu")
    rank = int(os.environ["RANK"])
    meeting = torch.distributed.FileStore(f"{folder}/meeting", int(os.environ["WORLD_SIZE"]))  # no port to clash over
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
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


if __name__ == "__main__":
    _child(sys.argv[1])
