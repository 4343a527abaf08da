"""Writing a checkpoint's files in a thread, while the run goes on with the weights.

Megatron-core plans a save and says what is to be written (an AsyncRequest); it would then fork a process for each file.
A fork of a process that has threads, sockets and a GPU may hang, and costs seconds: here the same function writes, in a
thread, from copies in host memory.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint import files
from megarl.cluster import device
from megarl.sync.background import in_thread


class Writing:
    """A rank's part of a save, under way.

    Args:
        request: from `dist_checkpointing.save(..., async_sharded_save=True)`, with this process's results queue.
        own: addresses of tensors that nobody else will change, so that they need no copy.
        more: writes further files of this rank; their paths.
    """

    def __init__(self, request: Any, own: set[int], more: Callable[[], list[Path]]) -> None:
        self._request = request
        buckets = request.async_fn_args[1] if request.async_fn_args else []
        copies = [(name, key, (data, [(item, _held(tensor, own)) for item, tensor in tensors]))
                  for name, key, (data, tensors) in buckets]
        device.synchronize()
        self._work: Future[dict[str, tuple[int, str]]] = in_thread(lambda: self._write(copies, more), "checkpoint")

    def done(self) -> bool:
        """Whether this rank has written its files (or failed to)."""
        return self._work.done()

    def wait(self) -> dict[str, tuple[int, str]]:
        """Checksums of this rank's files, once they are written.

        Raises:
            Exception: what kept one from being written.
        """
        return self._work.result()

    def conclude(self) -> None:
        """Write what describes the whole, after all ranks have written. Collective over the trainers."""
        if self._request.async_fn_args:
            self._request.async_fn_args[2].put(self._results)
        for conclude in self._request.finalize_fns:
            conclude()

    def _write(self, buckets: list[Any], more: Callable[[], list[Path]]) -> dict[str, tuple[int, str]]:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        self._results: dict[int, Any] = {}
        written = []
        for number, bucket in enumerate(buckets):
            told, counted = queue.SimpleQueue(), queue.Queue()
            counted.put(number)
            transforms = self._request.async_fn.args[0]
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, told, counted, True)
            _, outcome = told.get()
            if isinstance(outcome, Exception):
                raise outcome
            self._results[number] = outcome
            written.append(Path(bucket[0]))
        written += more()
        return {path.name: files.digest(path) for path in written}


@contextmanager
def failures_kept() -> Iterator[list[Exception]]:
    """In here, what rank 0 alone writes between collectives of Megatron-core's does not raise: failures are listed.

    Alone with its failure, it would leave the other ranks waiting in the next collective.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    found: list[Exception] = []

    def keeping(write: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **named: Any) -> None:
            try:
                write(*args, **named)
            except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
                found.append(error)
        return call

    writers = [(TorchCommonSaveStrategy, "save_common"), (FileSystemWriterAsync, "finish"),
               (serialization, "save_config")]
    before = [(owner, name, vars(owner).get(name)) for owner, name in writers]
    for owner, name in writers:
        setattr(owner, name, keeping(getattr(owner, name)))
    try:
        yield found
    finally:
        for owner, name, own in before:
            delattr(owner, name) if own is None else setattr(owner, name, own)


def use_thread_results() -> None:
    """Have Megatron-core's writer hand results over inside this process; its own way starts a server process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not isinstance(filesystem_async._results_queue, _Results):
        filesystem_async._results_queue = _Results()


class _Results(queue.Queue):
    """Results of this process's writes."""


def _held(tensor: torch.Tensor, own: set[int]) -> torch.Tensor:
    """The tensor's values in host memory that nobody changes."""
    if tensor.device.type != "cpu":
        return tensor.to("cpu", non_blocking=True)
    return tensor if tensor.data_ptr() in own else tensor.clone()
