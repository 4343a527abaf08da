"""Conversations in the embedded engine: what a turn left is not computed again, and changes no number by it."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from embedded_parts import answer_of, ids_of, logprobs_of, run, scheduler_for, submit
from models import save_hf_model

from megarl.rollout.embedded.cache import Computed
from megarl.rollout.embedded.prefixes import PrefixCache


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def path(request, tmp_path_factory):
    return save_hf_model(request.param, tmp_path_factory.mktemp(request.param))


def _computed(tokens):
    return Computed(torch.zeros(1, 2, 1, tokens, 2))


def _tokens(*values):
    return np.array(values, np.int64)


def test_the_longest_whole_sequence_is_found():
    cache = PrefixCache(100)
    short, long = _computed(2), _computed(4)
    cache.keep(_tokens(1, 2), short)
    cache.keep(_tokens(1, 2, 3, 4), long)
    assert cache.find(_tokens(1, 2, 3, 4, 5)) is cache.find(_tokens(1, 2, 3, 4)) is long
    assert cache.find(_tokens(1, 2, 3)) is cache.find(_tokens(1, 2, 9, 4, 5)) is short
    assert cache.find(_tokens(1)) is cache.find(_tokens(2, 1, 2)) is cache.find(_tokens()) is None
    cache.clear()
    assert cache.find(_tokens(1, 2, 3)) is None and cache.tokens == 0


def test_memory_is_bounded_and_the_oldest_goes_first():
    cache = PrefixCache(6)
    for first in (1, 2, 3):
        cache.keep(_tokens(first, 0), _computed(2))
    assert cache.find(_tokens(1, 0, 0)) is not None  # used: now 2 is the oldest
    cache.keep(_tokens(4, 0, 0), _computed(3))
    assert [cache.find(_tokens(first, 0, 0)) is not None for first in (1, 2, 3, 4)] == [True, False, False, True]
    assert cache.tokens == 5
    cache.keep(_tokens(*range(7)), _computed(7))  # more than there is room for
    assert cache.tokens == 5
    none = PrefixCache(0)
    none.keep(_tokens(1), _computed(1))
    assert none.tokens == 0


def _body(prompt, seed=3, **params):
    return {"rid": "r", "input_ids": [int(token) for token in prompt], "sampling_params": {
        "max_new_tokens": 9, "sampling_seed": seed, "ignore_eos": True, **params}}


def _talk(scheduler, turns=4, begin=30, **more):
    """A conversation: each prompt is the one before, its answer, and five new tokens."""
    prompt, items = list(range(2, 2 + begin)), []
    for turn in range(turns):
        (item,) = run(scheduler, {**_body(prompt), **more}, routing=bool(more))
        items.append((prompt, item))
        prompt = [*prompt, *ids_of(item), *range(40 + turn, 45 + turn)]
    return items


def test_the_next_turn_computes_what_is_new(path):
    kept, plain = scheduler_for(path, prefix_tokens=1000), scheduler_for(path)
    talk, same = _talk(kept), _talk(plain)
    before = 0
    for (prompt, item), (other_prompt, other) in zip(talk, same, strict=True):
        assert prompt == other_prompt and ids_of(item) == ids_of(other)
        np.testing.assert_allclose(logprobs_of(item), logprobs_of(other), atol=1e-5)
        assert item["meta_info"]["cached_tokens"] == before and other["meta_info"]["cached_tokens"] == 0
        before = len(prompt) + 9 - 1  # its last token was never computed
    assert kept.prefilled_tokens == 29 + 3 * 5  # five new ones and the reply's last, without the prompt's own last
    assert plain.prefilled_tokens == sum(len(prompt) - 1 for prompt, _ in talk)


def test_a_group_that_goes_on_shares_the_rest(path):
    kept = scheduler_for(path, slots=3, prefix_tokens=1000)
    (prompt, item), _ = _talk(kept, turns=2)
    begun = [*prompt, *ids_of(item), 50, 51, 52]
    done = kept.prefilled_tokens
    items = run(kept, _body(begun, seed=[1, 2, 3, 4, 5], n=5))
    assert kept.prefilled_tokens == done + 3
    assert [one["meta_info"]["cached_tokens"] for one in items] == [len(begun) - 4] + [len(begun) - 1] * 4
    for seed, one in enumerate(items, 1):
        (alone,) = run(scheduler_for(path), _body(begun, seed=seed))
        assert ids_of(alone) == ids_of(one)
        np.testing.assert_allclose(logprobs_of(alone), logprobs_of(one), atol=1e-5)


def test_a_prompt_that_shares_a_part_is_computed_whole_to_the_bit(path):
    kept = scheduler_for(path, prefix_tokens=1000)
    (prompt, item), _ = _talk(kept, turns=2)
    for other in (prompt, [*prompt, *ids_of(item)[:4], 60, 61], [*prompt[:-1], 60]):
        (one,), (alone,) = run(kept, _body(other, seed=8)), run(scheduler_for(path), _body(other, seed=8))
        assert one["meta_info"]["cached_tokens"] == 0
        assert (ids_of(one), logprobs_of(one)) == (ids_of(alone), logprobs_of(alone))


def test_a_prompt_of_what_is_kept_and_one_token_computes_nothing(path):
    kept = scheduler_for(path, prefix_tokens=1000)
    ((prompt, item),) = _talk(kept, turns=1)
    begun, done = [*prompt, *ids_of(item)], kept.prefilled_tokens
    (one,) = run(kept, _body(begun))
    assert kept.prefilled_tokens == done and one["meta_info"]["cached_tokens"] == len(begun) - 1
    (alone,) = run(scheduler_for(path), _body(begun))
    assert ids_of(alone) == ids_of(one)


@pytest.mark.parametrize("loses", ["flush", "retract", "forget"])
def test_new_weights_find_nothing(path, loses):
    kept = scheduler_for(path, prefix_tokens=1000)
    ((prompt, item),) = _talk(kept, turns=1)
    getattr(kept, loses)()
    assert kept._prefixes.tokens == 0
    (one,) = run(kept, _body([*prompt, *ids_of(item), 50]))
    assert one["meta_info"]["cached_tokens"] == 0


def test_keys_and_values_of_old_weights_are_not_kept(path):
    """A sequence that goes on over an update without being retracted (pause in_place)."""
    kept = scheduler_for(path, prefix_tokens=1000)
    first = submit(kept, _body(range(2, 12)))
    kept.step()
    kept.forget()  # what an update does
    while kept.step():
        pass
    assert len(ids_of(answer_of(first)[0])) == 9 and kept._prefixes.tokens == 0
    again = submit(kept, _body(range(2, 12)))
    kept.step()
    kept.retract()
    while kept.step():
        pass
    assert len(ids_of(answer_of(again)[0])) == 9 and kept._prefixes.tokens == 18  # computed anew


def test_an_aborted_turn_may_be_gone_on_from(path):
    kept = scheduler_for(path, prefix_tokens=1000)
    first = submit(kept, _body(range(2, 12)))
    for _ in range(4):
        kept.step()
    kept.abort(lambda _: True)
    (item,) = answer_of(first)
    assert len(ids_of(item)) == 4
    (one,) = run(kept, _body([*range(2, 12), *ids_of(item)], max_new_tokens=5))
    (whole,) = run(scheduler_for(path), _body(range(2, 12)))
    assert one["meta_info"]["cached_tokens"] == 13 and ids_of(item) + ids_of(one) == ids_of(whole)


def test_a_sequence_that_overflowed_is_not_kept(path):
    kept = scheduler_for(path, prefix_tokens=1000)
    with torch.inference_mode():
        kept._decoder.weights.head_vh[:] = float("nan")
    run(kept, _body(range(2, 12)))
    assert kept._prefixes.tokens == 0


def test_routing_comes_along(tmp_path_factory):
    path = save_hf_model("qwen3_moe", tmp_path_factory.mktemp("routing"))
    wanted = {"return_routed_experts": True}
    kept = scheduler_for(path, routing=True, prefix_tokens=1000)
    plain = scheduler_for(path, routing=True)
    for (prompt, item), (_, other) in zip(_talk(kept, **wanted), _talk(plain, **wanted), strict=True):
        ours, theirs = (np.frombuffer(base64.b64decode(one["meta_info"]["routed_experts"]), np.int32)
                        for one in (item, other))
        assert len(ours) == len(theirs) and len(ours) % (len(prompt) + 9 - 1) == 0
        assert (ours == theirs).all()
