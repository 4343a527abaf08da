"""Sampling of the embedded engine: the generator, the inverse of the distribution, truncation; values by hand."""

import math

import numpy as np
import torch

from megarl.rollout.embedded.sampler import OFF_TOP_K, sample, seed_keys, uniforms

MASK = (1 << 64) - 1


def _split_mix(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_uniforms_are_a_hash_of_seed_and_position():
    golden = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 12345, MASK, 7, 7], [0, 0, 3, 2**40, 5, 6]
    expected = [(_split_mix((_split_mix((seed + golden) & MASK) + (position + 1) * golden) & MASK) >> 12) * 2.0**-52
                for seed, position in zip(seeds, positions, strict=True)]
    found = uniforms(seed_keys(np.array(seeds, np.uint64)), np.array(positions, np.uint64))
    assert found.tolist() == expected and len(set(expected)) == 6


def test_uniforms_look_uniform_and_unrelated():
    seeds, positions = (grid.ravel().astype(np.uint64) for grid in np.meshgrid(np.arange(200), np.arange(200)))
    drawn = uniforms(seed_keys(seeds), positions).reshape(200, 200)
    assert 0 <= drawn.min() and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 / math.sqrt(12 * drawn.size)
    counts = np.histogram(drawn, 64, (0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 63 + 4 * math.sqrt(126)
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):  # neighbours in position and in seed
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(drawn.size)


def _sample(probs, uniform, temperature=1.0, top_p=1.0, top_k=OFF_TOP_K, min_p=0.0):
    """Rows of the same distribution, one per given uniform; parameters may be lists too."""
    rows = len(uniform)
    logits = torch.tensor(probs, dtype=torch.float32).log().repeat(rows, 1)
    return sample(logits, np.broadcast_to(np.float32(temperature), rows).copy(),
                  np.broadcast_to(np.float64(top_p), rows).copy(), np.broadcast_to(np.int64(top_k), rows).copy(),
                  np.broadcast_to(np.float64(min_p), rows).copy(), np.array(uniform, np.float64))


PROBS = [0.125, 0.5, 0.25, 0.0, 0.125]
EDGES = [0.0, 0.124, 0.126, 0.624, 0.626, 0.874, 0.876, 1 - 2.0**-52]


def test_inverse_of_the_distribution_in_order_of_tokens():
    tokens, logprobs = _sample(PROBS, EDGES)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 4, 4]
    np.testing.assert_allclose(logprobs, np.log([PROBS[token] for token in tokens]), atol=1e-6)


def test_temperature_changes_both_tokens_and_logprobs_and_zero_is_greedy():
    sharp = np.array(PROBS) ** 2 / (np.array(PROBS) ** 2).sum()  # temperature 1/2
    tokens, logprobs = _sample(PROBS, EDGES[:-1] + [0.5], temperature=[0.5] * 7 + [0.0])
    cumulated = np.cumsum(sharp)
    assert tokens.tolist() == [int((cumulated <= u).sum()) for u in EDGES[:-1]] + [1]
    np.testing.assert_allclose(logprobs[:-1], np.log(sharp[tokens[:-1]]), atol=1e-6)
    np.testing.assert_allclose(logprobs[-1], math.log(0.5), atol=1e-6)
    assert _sample(PROBS, [0.99, 0.0], temperature=0.0)[0].tolist() == [1, 1]


def test_truncation_renormalises_the_draw_but_not_the_logprob():
    every = np.arange(64) / 64 + 1 / 128
    kept = {"top_k": (2, {1, 2}), "top_p": (0.7, {1, 2}), "min_p": (0.4, {1, 2})}
    for name, (value, expected) in kept.items():
        tokens, logprobs = _sample(PROBS, every, **{name: value})
        assert set(tokens.tolist()) == expected
        assert (tokens == 1).mean() == np.round(64 * 2 / 3) / 64
        np.testing.assert_allclose(logprobs, np.log([PROBS[token] for token in tokens]), atol=1e-6)
    assert set(_sample(PROBS, every, top_p=0.5)[0].tolist()) == {1}  # 0.5 is reached by the first alone
    assert set(_sample(PROBS, every, top_p=0.51)[0].tolist()) == {1, 2}
    assert set(_sample(PROBS, every, top_p=1e-9)[0].tolist()) == {1}
    assert set(_sample(PROBS, every, top_k=3)[0].tolist()) == {0, 1, 2}  # equal probabilities: the lower token first
    assert set(_sample(PROBS, every, min_p=0.25)[0].tolist()) == {0, 1, 2, 4}


def test_a_row_is_the_same_whatever_its_neighbours_ask_for():
    uniform = np.linspace(0, 0.999, 32)
    alone = _sample(PROBS, uniform)
    mixed = _sample(PROBS, np.repeat(uniform, 2), temperature=[1.0, 0.0] * 32, top_p=[1.0, 0.3] * 32,
                    top_k=[OFF_TOP_K, 2] * 32, min_p=[0.0, 0.5] * 32)
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one, other[::2])


def test_rows_that_are_not_finite_say_so():
    logits = torch.tensor([[0.0, float("nan"), 0.0], [0.0, 0.0, 0.0]])
    ones = np.ones(2)
    tokens, logprobs = sample(logits, ones.astype(np.float32), ones, np.array([OFF_TOP_K] * 2), 0 * ones, ones / 2)
    assert not np.isfinite(logprobs[0]) and tokens[1] == 1 and (tokens < 3).all()
