"""Packed batches against a construction by hand, token by token."""

import numpy as np
import pytest
import torch

from megarl.config.layout import Layout
from megarl.data.batch import build_batch
from megarl.data.ragged import SampleBatch
from megarl.data.sample import Group, Prompt, Sample

LAYOUTS = [Layout(world=1), Layout(world=2, context=2), Layout(world=4, context=4),
           Layout(world=2, tensor=2, sequence=True), Layout(world=12, tensor=3, context=2, pipeline=2, sequence=True)]


def experience(shapes, seed=0):
    """Groups of one sample each, from (prompt tokens, response tokens)."""
    random = np.random.default_rng(seed)
    groups = []
    for position, (prompt_tokens, response_tokens) in enumerate(shapes):
        prompt = Prompt(position=position + 7, epoch=0, index=position, source="s",
                        token_ids=random.integers(1, 1000, prompt_tokens).astype(np.int32))
        sample = Sample(prompt, n=position % 3, seed=1, response_ids=random.integers(1, 1000, response_tokens),
                        logprobs=-random.random(response_tokens).astype(np.float32),
                        finish="length" if position % 2 else "stop", reward=0.1 * position)
        groups.append(Group(prompt, [sample]))
    return groups


def by_hand(groups, indices, layout, values):
    """What each rank of a pack should hold: a list per field, per context-parallel rank. No numpy, no cleverness."""
    cp, unit = layout.context, layout.sequence_multiple
    fields = ("tokens", "positions", "labels", "mask", "padding", "sequence", "value")
    entries = []
    for number, index in enumerate(indices):
        sample = groups[index].samples[0]
        prompt, response = sample.prompt.token_ids.tolist(), np.asarray(sample.response_ids).tolist()
        tokens = prompt + response
        rows = []
        for t in range(len(tokens)):
            has_label = t + 1 < len(tokens)
            trained = has_label and t + 1 >= len(prompt)
            rows.append((tokens[t], t, tokens[t + 1] if has_label else 0, trained, False, number,
                         values[index][t + 1 - len(prompt)] if trained else 0.0))
        while len(rows) % unit:
            rows.append((0, len(rows), 0, False, True, number, 0.0))
        entries.append(rows)
    tail = []
    while (sum(map(len, entries)) + len(tail)) % layout.pack_multiple or not (entries or tail):
        tail.append((0, len(tail), 0, False, True, len(indices), 0.0))
    if tail:
        entries.append(tail)
    shares = []
    for rank in range(cp):
        mine = []
        for rows in entries:
            if cp == 1:
                mine += rows
            else:
                chunk = len(rows) // (2 * cp)
                pieces = [rows[k * chunk:(k + 1) * chunk] for k in range(2 * cp)]
                mine += pieces[rank] + pieces[2 * cp - 1 - rank]
        shares.append({name: [row[k] for row in mine] for k, name in enumerate(fields)})
    return shares, [len(rows) for rows in entries]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.describe())
@pytest.mark.parametrize("shapes,indices", [
    ([(5, 4), (1, 3), (3, 0), (16, 8), (2, 1)], [0, 1, 2, 3, 4]),
    ([(5, 4), (1, 3), (3, 0), (16, 8), (2, 1)], [3, 1]),
    ([(1, 1)], [0]),
    ([(7, 9), (4, 4)], []),
])
def test_against_a_construction_by_hand(layout, shapes, indices):
    groups = experience(shapes)
    samples = SampleBatch.from_groups(groups)
    values = [np.random.default_rng(i).random(shape[1]).astype(np.float32) for i, shape in enumerate(shapes)]
    expected, lengths = by_hand(groups, indices, layout, values)
    assert all(len(one["tokens"]) % (layout.tensor if layout.sequence else 1) == 0 for one in expected)
    for rank in range(layout.context):
        batch = build_batch(samples, indices, layout, cp_rank=rank, per_token={"old_logprobs": np.concatenate(values)},
                            numbers=np.arange(len(shapes)) + 100)
        want = expected[rank]
        for name in ("tokens", "positions", "labels", "mask", "padding", "sequence"):
            assert getattr(batch, f"{name}_t").tolist() == want[name], (name, rank)
        torch.testing.assert_close(batch.per_token["old_logprobs"], torch.tensor(want["value"]), rtol=0, atol=0)
        assert batch.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
        assert batch.cu_seqlens.dtype == torch.int32 and batch.tokens_t.dtype == torch.int64
        assert batch.max_seqlen == max(lengths)
        assert batch.samples.tolist() == [i + 100 for i in indices] and batch.sequences == len(indices)
        assert (batch.cp_size, batch.cp_rank) == (layout.context, rank)


def test_hand_case_in_full():
    """Prompt 11 12, response 13 14 15, then prompt 21, response 22; nothing to pad."""
    groups = experience([(2, 3), (1, 1)])
    groups[0].prompt.token_ids[:] = [11, 12]
    groups[0].samples[0].response_ids = np.array([13, 14, 15])
    groups[1].prompt.token_ids[:] = [21]
    groups[1].samples[0].response_ids = np.array([22])
    samples = SampleBatch.from_groups(groups)
    batch = build_batch(samples, [0, 1], Layout(world=1), per_sample={"advantages": np.array([2.0, -1.0])},
                        per_token={"weights": np.array([.1, .2, .3, .4])})
    assert batch.tokens_t.tolist() == [11, 12, 13, 14, 15, 21, 22]
    assert batch.labels_t.tolist() == [12, 13, 14, 15, 0, 22, 0]
    assert batch.mask_t.tolist() == [False, True, True, True, False, True, False]
    assert batch.per_token["advantages"].tolist() == [0, 2, 2, 2, 0, -1, 0]
    assert batch.per_token["weights"].tolist() == torch.tensor([0, .1, .2, .3, 0, .4, 0]).tolist()
    assert batch.per_token["engine_logprobs"][batch.mask_t].tolist() == samples.logprobs.tolist()
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    moved = batch.to("meta")
    assert moved.tokens_t.is_meta and moved.per_token["engine_logprobs"].is_meta and not moved.cu_seqlens.is_meta


def test_what_an_environment_said_is_context_only():
    """Prompt 11, response 12 13 14 15 16 of which the engine sampled 12 and 15 16, with weights 3 and then 4."""
    groups = experience([(1, 5)])
    sample = groups[0].samples[0]
    groups[0].prompt.token_ids[:] = [11]
    sample.response_ids = np.arange(12, 17)
    sample.trained = np.array([True, False, False, True, True])
    sample.versions = [("g:3", 0, 1), ("g:4", 3, 5)]
    assert sample.token_versions().tolist() == [3, -1, -1, 4, 4]
    samples = SampleBatch.from_groups(groups)
    assert samples.trained_lengths.tolist() == [3]
    batch = build_batch(samples, [0], Layout(world=1), per_token={"lag": 4 - samples.versions})
    assert batch.labels_t.tolist() == [12, 13, 14, 15, 16, 0]
    assert batch.mask_t.tolist() == [True, False, False, True, True, False]
    assert batch.per_token["lag"].tolist() == [1, 0, 0, 0, 0, 0]
    a, b, c = (sample.logprobs[place] for place in (0, 3, 4))
    assert batch.per_token["engine_logprobs"].tolist() == [a, 0, 0, b, c, 0]
    sample.versions = [("g:3", 0, 1), ("g:4", 3, 4)]
    with pytest.raises(ValueError, match="leave out tokens that are trained on"):
        sample.token_versions()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.describe())
def test_filler(layout):
    samples = SampleBatch.from_groups([])
    batch = build_batch(samples, [], layout, per_sample={"weights": np.zeros(0)})
    assert batch.sequences == 0 and len(batch.tokens_t) * layout.context == layout.pack_multiple
    assert batch.padding_t.all() and not batch.mask_t.any()
    assert batch.cu_seqlens.tolist() == [0, layout.pack_multiple]
    assert set(batch.per_token) == {"engine_logprobs", "weights"}


def test_values_of_the_wrong_length_are_refused():
    samples = SampleBatch.from_groups(experience([(2, 3)]))
    with pytest.raises(ValueError, match="weights"):
        build_batch(samples, [0], Layout(world=1), per_token={"weights": np.zeros(2)})
    with pytest.raises(ValueError, match="advantages"):
        build_batch(samples, [0], Layout(world=1), per_sample={"advantages": np.zeros(2)})


def test_sample_batch_from_groups():
    groups = experience([(5, 4), (1, 3), (3, 0), (16, 8)])
    groups[1].samples[0].reward = None
    samples = SampleBatch.from_groups(groups)
    assert samples.position.tolist() == [7, 8, 9, 10] and samples.n.tolist() == [0, 1, 2, 0]
    assert samples.truncated.tolist() == [False, True, False, True]
    assert np.isnan(samples.rewards[1]) and samples.rewards[3] == 0.1 * 3
    part = samples.select([2, 0])
    assert part.tokens.tolist() == [*groups[2].prompt.token_ids, *groups[0].prompt.token_ids,
                                    *groups[0].samples[0].response_ids]
    assert part.logprobs.tolist() == groups[0].samples[0].logprobs.tolist()


def test_wires_concatenate():
    """What an all-to-all does: the receiver gets the pieces of several senders end to end."""
    groups = experience([(5, 4), (1, 3), (3, 0), (16, 8)])
    groups[1].samples[0].advantages = np.array([0.5, 0, -1.5], np.float32)
    samples = SampleBatch.from_groups(groups)
    assert np.flatnonzero(~np.isnan(samples.advantages)).tolist() == [4, 5, 6]
    wires = [samples.select(rows).to_wire() for rows in ([3, 1], [], [0])]
    received = SampleBatch.from_wire(*(torch.cat(parts) for parts in zip(*wires, strict=True)))
    for name in vars(samples):
        np.testing.assert_array_equal(getattr(received, name), getattr(samples.select([3, 1, 0]), name))
    assert received.rewards.dtype == np.float64 and received.tokens.dtype == np.int32


def test_lengths_that_do_not_add_up_are_refused():
    samples = SampleBatch.from_groups(experience([(5, 4)]))
    meta, ints, *others = samples.to_wire()
    with pytest.raises(ValueError, match="8 tokens"):
        SampleBatch.from_wire(meta, ints[:-1], *others)
    with pytest.raises(ValueError, match="at least one token"):
        SampleBatch.from_groups(experience([(0, 4)]))
