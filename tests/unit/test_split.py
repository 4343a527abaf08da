"""Waiting weight gradients: keys, order, what is refused, and Transformer Engine's queues (played by a stand-in)."""

from __future__ import annotations

import queue
import weakref
from types import SimpleNamespace

import pytest
import torch

from megarl.pipeline.split import QueuedWeightGradients, WeightGradients, weight_gradients


class Local(torch.nn.Module):
    """Defers as model.linear does; notes what was computed."""

    weight_gradients: WeightGradients | None = None

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def backward(self, what: str) -> None:
        if self.weight_gradients.deferring:
            self.weight_gradients.collect(lambda: self.done.append(what))
        else:
            self.done.append(what)


def test_local_gradients_wait_by_key() -> None:
    linear = Local()
    store = weight_gradients({0: torch.nn.Sequential(linear)}, "local")
    assert linear.weight_gradients is store
    for microbatch in (0, 1):
        with store.defer((0, microbatch)):
            linear.backward(f"fc2 of {microbatch}")
            linear.backward(f"fc1 of {microbatch}")
    assert linear.done == []
    with store.at_once((0, 2)):
        linear.backward("B")
    store.run((0, 1))  # any order
    assert linear.done == ["B", "fc2 of 1", "fc1 of 1"]
    with pytest.raises(RuntimeError, match="no W came for stage 0, micro-batch 0"):
        store.assert_empty()
    store.run((0, 0))
    store.assert_empty()
    assert linear.done[3:] == ["fc2 of 0", "fc1 of 0"]


def test_closures_are_freed_one_by_one() -> None:
    store, freed, seen = WeightGradients({}), [], []
    with store.defer((0, 0)):
        for number in range(2):
            tensor = torch.zeros(1)
            weakref.finalize(tensor, freed.append, number)
            store.collect(lambda tensor=tensor: seen.append((tensor.item(), list(freed))))
    del tensor
    store.run((0, 0))
    assert seen == [(0, []), (0, [0])] and freed == [0, 1]


def test_wrong_orders_are_refused() -> None:
    linear = Local()
    store = WeightGradients({0: linear})
    with pytest.raises(RuntimeError, match="W of stage 0, micro-batch 0 without its I"):
        store.run((0, 0))
    with pytest.raises(RuntimeError, match="deferred a weight gradient in the I of stage 0"), store.defer((0, 0)):
        pass
    with store.defer((0, 0)):
        linear.backward("fc1")
        with pytest.raises(RuntimeError, match="within another I"), store.defer((0, 1)):
            pass
        with pytest.raises(RuntimeError, match="within an I"), store.at_once((0, 1)):
            pass
    with pytest.raises(RuntimeError, match="a second time"), store.defer((0, 0)):
        pass
    store.run((0, 0))
    with pytest.raises(RuntimeError, match="without its I"):
        store.run((0, 0))
    with pytest.raises(ZeroDivisionError), store.defer((0, 3)):
        linear.backward(str(1 / 0))
    assert not store.deferring
    store.assert_empty()


class Queued(torch.nn.Module):
    """A module of Transformer Engine with delay_wgrad_compute: module/_common.py WeightGradStore and
    module/base.py backward_dw of 2.9, without the products."""

    def __init__(self, delays: bool = True, hooked: bool = True) -> None:
        super().__init__()
        self.done: list[str] = []
        self.wgrad_store = SimpleNamespace(context=queue.Queue() if delays else None,
                                           delay_wgrad_compute=lambda: delays)
        self.wgrad_accumulation_and_reduce_hooks = [lambda: None] if hooked else []

    def backward(self, what: str) -> None:
        if self.wgrad_store.delay_wgrad_compute():
            self.wgrad_store.context.put(what)
        else:
            self.done.append(what)

    def backward_dw(self) -> None:
        self.done.append(self.wgrad_store.context.get_nowait())


def test_queues_serve_the_order_of_i() -> None:
    fc1, fc2 = Queued(), Queued()
    fc1.done = fc2.done  # one list for the order of both
    other = Queued()
    store = weight_gradients({0: torch.nn.Sequential(fc1, fc2), 3: other}, "transformer_engine")
    assert isinstance(store, QueuedWeightGradients)
    for microbatch in (1, 0):
        with store.defer((0, microbatch)):
            fc2.backward(f"fc2 of {microbatch}")
            fc1.backward(f"fc1 of {microbatch}")
    with store.defer((3, 0)):
        other.backward("other")
    with pytest.raises(RuntimeError, match="W of stage 0, micro-batch 0 before that of stage 0, micro-batch 1"):
        store.run((0, 0))
    with pytest.raises(RuntimeError, match="B of stage 0, micro-batch 2 between I and W"), store.at_once((0, 2)):
        pass
    store.run((3, 0))  # stages do not wait for each other
    store.run((0, 1))
    assert fc2.done == ["fc2 of 1", "fc1 of 1"]
    store.run((0, 0))
    with store.at_once((0, 2)):
        fc2.backward("fc2 of 2")
        fc1.backward("fc1 of 2")
    assert fc2.done[2:] == ["fc2 of 0", "fc1 of 0", "fc2 of 2", "fc1 of 2"]
    store.assert_empty()
    assert fc1.wgrad_store.context.empty() and fc2.wgrad_store.context.empty()


def test_a_module_that_runs_twice_or_not_at_all() -> None:
    """As experts without tokens or a recomputed layer may: as many entries out as went in."""
    once, never = Queued(), Queued()
    store = QueuedWeightGradients({0: torch.nn.Sequential(once, never)})
    with store.defer((0, 0)):
        once.backward("a")
        once.backward("b")
    store.run((0, 0))
    assert once.done == ["a", "b"] and never.done == []


def test_queues_that_ddp_does_not_collect_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"1 of stage 0 .* delay_wgrad_compute=True"):
        QueuedWeightGradients({0: torch.nn.Sequential(Queued(), Queued(hooked=False))})


def test_modules_that_do_not_delay() -> None:
    """B works as ever; I is refused, for it would be a B."""
    module = Queued(delays=False, hooked=False)
    store = QueuedWeightGradients({0: module})
    with store.at_once((0, 0)):
        module.backward("B")
    assert module.done == ["B"]
    with pytest.raises(RuntimeError, match="no linear deferred"), store.defer((0, 1)):
        module.backward("I")
    store.assert_empty()
