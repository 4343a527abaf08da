"""Split backward: the weight gradients of linears wait between a stage's I and its W. Knows torch only.

A full backward (B) of a linear y = x w^T gives the gradient of x and the gradient of w. The stage before needs only the
first, so a schedule may run it alone (I) and fill a bubble with the second (W) later (zero-bubble pipelines, Qi et al.
2023, arXiv 2401.10241). Here an I is a backward within `defer(key)`, a W is `run(key)`, and a key is (stage,
micro-batch). Between them nothing of the graph is kept but x and the gradient of y, for each linear. All other
gradients (norms, biases, router, embedding, head) are those of I.

Two back ends, one interface:

local               `model.linear`: each linear hands over a closure for each micro-batch. W may come in any order.
transformer_engine  modules built with `delay_wgrad_compute` keep queues of their own; `backward_dw()` takes the oldest
                    entry. So W must come in the order of I in each stage, and *every* backward is deferred: a B is an
                    I with its W at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

Key = tuple[int, int]  # stage, micro-batch
_ORDER = "Transformer Engine gives a stage's weight gradients in the order of its I's"


class WeightGradients:
    """The weight gradients that wait, of the local linears in `chunks`.

    A linear that can wait has an attribute `weight_gradients`; it is set to this object, which serves the chunks from
    then on (the last one made for a chunk counts).

    Args:
        chunks: this rank's chunks by stage, bare or wrapped.
    """

    def __init__(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        self._waiting: dict[Key, list[Callable[[], None]]] = {}  # in the order of the I's
        self._collecting: list[Callable[[], None]] | None = None
        for chunk in chunks.values():
            for module in chunk.modules():
                if hasattr(module, "weight_gradients"):
                    module.weight_gradients = self

    @property
    def deferring(self) -> bool:
        """Whether a backward within `defer` is running: the linears then `collect` instead of computing."""
        return self._collecting is not None

    def collect(self, compute: Callable[[], None]) -> None:
        """Keep a closure that computes and accumulates one weight gradient. For linears, while `deferring`."""
        assert self._collecting is not None
        self._collecting.append(compute)

    @contextmanager
    def defer(self, key: Key) -> Iterator[None]:
        """The backward in this block is an I: its weight gradients wait under `key`.

        Raises:
            RuntimeError: the key waits already, blocks are nested, or no linear of the stage deferred anything.
        """
        if self._collecting is not None:
            raise RuntimeError(f"I of {_name(key)} within another I")
        if key in self._waiting:
            raise RuntimeError(f"I of {_name(key)} a second time before its W")
        self._collecting = []
        try:
            yield
            collected = self._collecting
        finally:
            self._collecting = None
        self._keep(key, collected)

    @contextmanager
    def at_once(self, key: Key) -> Iterator[None]:
        """The backward in this block is a full B."""
        if self._collecting is not None:
            raise RuntimeError(f"B of {_name(key)} within an I")
        yield

    @torch.no_grad()
    def run(self, key: Key) -> None:
        """W: compute, accumulate and forget the weight gradients of `key`, in the order of its backward.

        Raises:
            RuntimeError: nothing waits under this key.
        """
        if key not in self._waiting:
            raise RuntimeError(f"W of {_name(key)} without its I")
        waiting = self._waiting.pop(key)[::-1]
        while waiting:
            waiting.pop()()  # and free what the closure held

    def refuse_waiting(self, key: Key) -> None:
        """For a B of `key` whose W is not this object's business. Local weight gradients do not mind.

        Raises:
            RuntimeError: in QueuedWeightGradients, an earlier I of this stage has not had its W.
        """

    def assert_empty(self) -> None:
        """At the end of a schedule.

        Raises:
            RuntimeError: some I has had no W; its weight gradients would be missing.
        """
        if self._waiting:
            raise RuntimeError(f"no W came for {', '.join(map(_name, self._waiting))}")

    def _keep(self, key: Key, collected: list[Callable[[], None]]) -> None:
        if not collected:
            raise RuntimeError(f"no linear deferred a weight gradient in the I of {_name(key)}")
        self._waiting[key] = collected


class QueuedWeightGradients(WeightGradients):
    """The same for Transformer Engine's modules, which keep their waiting gradients themselves.

    Each module's queue is FIFO, so this object only keeps count, and refuses the orders that a queue cannot serve.

    Args:
        chunks: this rank's chunks by stage, in Megatron-core's DDP with `delay_wgrad_compute=True`.
    Raises:
        RuntimeError: a module would not hand its gradients to DDP. `backward_dw` overwrites `.grad`; without DDP's
            hook on it, which TE has since 2.7, all gradients but the last would be lost without a word.
    """

    def __init__(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        super().__init__({})
        self._modules = {stage: _delaying(chunk) for stage, chunk in chunks.items()}
        for stage, modules in self._modules.items():
            for name, module in modules.items():
                if not getattr(module, "wgrad_accumulation_and_reduce_hooks", None):
                    raise RuntimeError(f"{name} of stage {stage} delays its weight gradient but Megatron's DDP does "
                                       "not collect it: its config needs delay_wgrad_compute=True, and "
                                       "transformer-engine must be 2.7 or newer")

    @contextmanager
    def defer(self, key: Key) -> Iterator[None]:
        """As for local linears; also a RuntimeError if the stage's modules were not built to delay."""
        modules = list(self._modules[key[0]].values())[::-1]  # backward order
        before = [module.wgrad_store.context.qsize() for module in modules]
        with super().defer(key):
            yield
            for module, size in zip(modules, before, strict=True):
                self._collecting += [module.backward_dw] * (module.wgrad_store.context.qsize() - size)

    @contextmanager
    def at_once(self, key: Key) -> Iterator[None]:
        """A full B: I, and W at once, where the modules delay.

        Raises:
            RuntimeError: an earlier I of this stage has not had its W, which is what the queues would give.
        """
        if not self._modules[key[0]]:
            yield
            return
        self.refuse_waiting(key)
        with self.defer(key):
            yield
        self.run(key)

    def refuse_waiting(self, key: Key) -> None:
        """See the base class."""
        oldest = self._oldest(key[0])
        if oldest is not None:
            raise RuntimeError(f"B of {_name(key)} between I and W of {_name(oldest)}: {_ORDER}")

    def run(self, key: Key) -> None:
        """W; also a RuntimeError if another I of this stage has waited longer."""
        oldest = self._oldest(key[0])
        if key in self._waiting and oldest != key:
            raise RuntimeError(f"W of {_name(key)} before that of {_name(oldest)}: {_ORDER}")
        super().run(key)

    def _oldest(self, stage: int) -> Key | None:
        return next((key for key in self._waiting if key[0] == stage), None)


def weight_gradients(chunks: Mapping[int, torch.nn.Module],
                     implementation: Literal["local", "transformer_engine"]) -> WeightGradients:
    """The weight gradients of `chunks` (by stage), which are of this implementation."""
    return WeightGradients(chunks) if implementation == "local" else QueuedWeightGradients(chunks)


def _delaying(chunk: torch.nn.Module) -> dict[str, Any]:
    """Transformer Engine's modules that were built with delay_wgrad_compute, by name."""
    stores = {name: (module, getattr(module, "wgrad_store", None)) for name, module in chunk.named_modules()}
    return {name: module for name, (module, store) in stores.items() if store is not None
            and store.delay_wgrad_compute()}


def _name(key: Key) -> str:
    return f"stage {key[0]}, micro-batch {key[1]}"
