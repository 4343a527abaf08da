"""The engine's routing: what a client accepts, and where each token's experts end up in a pack."""

import base64

import numpy as np
import pytest
from test_batch import LAYOUTS, experience

from megarl.config.layout import Layout
from megarl.data.batch import build_batch
from megarl.data.ragged import SampleBatch
from megarl.data.routing import ReplayShare, RoutingShape, flattened
from megarl.errors import UserMistake

# layer 0 is dense, as an engine's rows of zeros show it
SHAPE = RoutingShape(layers=4, moe_layers=(1, 2, 3), experts=8, top_k=2)


def encoded(rows):
    return base64.b64encode(np.asarray(rows, np.int32).tobytes()).decode()


def rows_of(tokens, shape=SHAPE):
    rows = np.zeros((tokens, shape.layers, shape.top_k), np.int32)
    rows[:, 1:, 0], rows[:, 1:, 1] = 3, 5
    return rows


def test_decoded_at_once_to_the_smallest_type():
    rows = rows_of(6)
    rows[2, 3] = 7, 0
    found = SHAPE.decode(encoded(rows), 6)
    assert found.dtype == np.uint8 and found.shape == (6, 3, 2) and found[2, 2].tolist() == [7, 0]
    np.testing.assert_array_equal(found, rows[:, 1:])
    many = RoutingShape(4, (1, 2, 3), 256, 2)
    rows[0, 1] = 255, 1
    assert many.dtype == np.uint16 and many.free == 65535 and many.token_bytes == 12  # 255 is an expert, not free
    np.testing.assert_array_equal(many.decode(encoded(rows), 6), rows[:, 1:])
    assert SHAPE.free == 255 and SHAPE.token_bytes == 6 and RoutingShape(1, (0,), 255, 1).dtype == np.uint8
    assert SHAPE.decode("", 0).shape == (0, 3, 2)


@pytest.mark.parametrize("spoil,words", [
    (lambda rows: rows[:-1], "160 bytes, 6 tokens x 4 layers x 2 experts have 192"),
    (lambda rows: np.where(rows == 5, 8, rows), r"in \[3, 8\], the model has 8"),
    (lambda rows: np.where(rows == 5, -1, rows), r"in \[-1, 3\]"),
    (lambda rows: rows * np.array([1, 1, 0, 1])[:, None], "an expert twice"),  # a layer that was never filled in
])
def test_what_is_refused(spoil, words):
    with pytest.raises(ValueError, match=words):
        SHAPE.decode(encoded(spoil(rows_of(6))), 6)


@pytest.mark.parametrize("text", ["####", None, 7, "AAA"])
def test_what_is_not_base64(text):
    with pytest.raises(ValueError, match="not base64"):
        SHAPE.decode(text, 6)


def test_samples_with_fewer_rows_or_none():
    some = np.full((2, 3, 2), 4, np.uint8)
    whole = flattened([(some, 3), (None, 2), (some, 5)])
    assert whole.shape == (10, 3, 2) and whole.dtype == np.uint8
    assert (whole[:, 0, 0] == 4).tolist() == [True, True, False, False, False, True, True, False, False, False]
    assert set(whole[2].flat) == {255}
    assert flattened([(None, 2)]) is None and flattened([]) is None
    with pytest.raises(ValueError, match="the last one has none"):
        flattened([(some, 2)])


def with_experts(shapes, shape, free_after=None):
    """Groups whose experts tell where they belong: a number for (sample, token, layer, place)."""
    groups = experience(shapes)
    for number, group in enumerate(groups):
        sample = group.samples[0]
        rows = sample.length - 1 if free_after is None or number else free_after
        sample.experts = mark(number, np.arange(rows), shape)
    return groups


def mark(sample, tokens, shape):
    """uint16 [tokens, MoE layers, k]."""
    layers, places = np.meshgrid(np.arange(len(shape.moe_layers)), np.arange(shape.top_k), indexing="ij")
    return (1000 * sample + 10 * tokens[:, None, None] + 2 * layers + places).astype(np.uint16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.describe())
def test_each_rank_gets_its_tokens_and_layers(layout: Layout):
    """Against a loop over sequences: padded, zig-zag over context ranks, then cut over sequence-parallel ranks."""
    shape = RoutingShape(4, (1, 2, 3), 30_000, 2)
    groups = with_experts([(5, 4), (1, 3), (3, 0), (16, 8)], shape, free_after=6)
    samples, indices = SampleBatch.from_groups(groups), [3, 0, 1]
    cp, tp = layout.context, layout.tensor if layout.sequence else 1
    whole: list[list[tuple[int, int]]] = []  # (sample, token) of each place; (-1, ..) is padding
    for index in indices:
        length, unit = groups[index].samples[0].length, layout.sequence_multiple
        whole.append([(index, t) if t < length else (-1, t) for t in range(-(-length // unit) * unit)])
    tail = -sum(map(len, whole)) % layout.pack_multiple
    whole += [[(-1, t) for t in range(tail)]] if tail else []
    for cp_rank in range(cp):
        places: list[tuple[int, int]] = []
        for rows in whole:
            chunk = len(rows) // (2 * cp) if cp > 1 else len(rows)
            for c in (cp_rank, 2 * cp - 1 - cp_rank) if cp > 1 else (0,):
                places += rows[c * chunk:(c + 1) * chunk]
        for tp_rank in range(tp):
            share = ReplayShare(shape, (1, 3), tp_rank, tp)
            batch = build_batch(samples, indices, layout, cp_rank=cp_rank, replay=share)
            mine = places[tp_rank * len(places) // tp:(tp_rank + 1) * len(places) // tp]
            assert sorted(batch.experts) == [1, 3]
            for layer, column in ((1, 0), (3, 2)):
                found = batch.experts[layer].numpy()
                assert found.dtype == np.uint16 and len(found) == len(mine)
                for (sample, token), row in zip(mine, found.tolist(), strict=True):
                    last = sample >= 0 and token >= (6 if sample == 0 else groups[sample].samples[0].length - 1)
                    free = sample < 0 or last
                    expected = [65535] * 2 if free else mark(sample, np.array([token]), shape)[0, column].tolist()
                    assert row == expected, (layout, sample, token)


def test_a_filler_is_free():
    shape = RoutingShape(4, (1, 2, 3), 30_000, 2)
    samples = SampleBatch.from_groups(with_experts([(5, 4)], shape))
    layout = Layout(world=4, tensor=2, context=2, sequence=True)
    batch = build_batch(samples, [], layout, replay=ReplayShare(shape, (2,), 1, 2))
    assert set(batch.experts[2].flatten().tolist()) == {65535}


def test_wires():
    shape = RoutingShape(4, (1, 2, 3), 30_000, 2)
    samples = SampleBatch.from_groups(with_experts([(5, 4), (1, 3)], shape))
    wire = samples.experts_to_wire(shape)
    assert wire.shape == (13, 12)
    back = samples.select([0, 1]).with_experts(wire, shape)
    np.testing.assert_array_equal(back.experts, samples.experts)
    np.testing.assert_array_equal(samples.select([1]).experts, samples.experts[9:])
    with pytest.raises(UserMistake, match="no experts to replay"):
        SampleBatch.from_groups(experience([(5, 4)])).experts_to_wire(shape)
    empty = SampleBatch.from_groups([])
    assert empty.experts_to_wire(shape).shape == (0, 12)
    with pytest.raises(ValueError, match="the model's"):
        samples.experts_to_wire(SHAPE)
    with pytest.raises(ValueError, match="rows of experts"):
        SampleBatch(**{**vars(samples), "experts": samples.experts[1:]})
