"""Buckets of weights: order, cap, dtype, and how long a bucket stays."""

from __future__ import annotations

import torch

from megarl.sync.buckets import fill


def test_buckets_keep_order_cap_and_dtype():
    tensors = [("a", torch.arange(3.0)), ("b", None), ("c", torch.ones(2, 2)),
               ("d", torch.ones(1, dtype=torch.bfloat16)), ("e", torch.zeros(9)), ("f", torch.full((), 5.0))]
    buckets = list(fill(iter(tensors), 16, torch.device("cpu")))
    assert [bucket.names for bucket in buckets] == [["a"], ["c"], ["d"], ["e"], ["f"]]
    assert [bucket.bytes for bucket in buckets] == [12, 16, 2, 36, 4] and buckets[1].shapes == [(2, 2)]
    two = list(fill(iter(tensors[:3]), 28, torch.device("cpu")))
    assert len(two) == 1 and two[0].shapes == [(3,), (2, 2)]
    assert two[0].storage.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_a_bucket_stays_while_the_next_is_filled():
    buckets = fill(((str(n), torch.full((2,), float(n))) for n in range(4)), 8, torch.device("cpu"))
    before = next(buckets)
    for number in range(1, 4):
        now = next(buckets)
        assert before.storage.view(torch.float32).tolist() == [number - 1.0] * 2
        before = now
