"""Answers of an engine are checked before they become samples."""

import base64
import copy

import numpy as np
import pytest

from megarl.data.routing import RoutingShape
from megarl.rollout.protocol import (
    BadAnswer,
    Completion,
    Expected,
    GenerateRequest,
    ModelInfo,
    Sampling,
    WrongVersion,
    format_version,
    parse_generate,
    parse_version,
)

REQUEST = GenerateRequest("life/0/1/p7/", np.array([5, 6, 7], np.int32), Sampling(4, 0.7, n=2), (11, 12))


def _item(ids, finish="stop", version="life:3"):
    return {"text": "", "output_ids": ids, "meta_info": {
        "finish_reason": {"type": finish}, "prompt_tokens": 3, "cached_tokens": 2, "weight_version": version,
        "output_token_logprobs": [[-0.5 - token, token, None] for token in ids]}}


GOOD = [_item([1, 2]), _item([3, 4, 5, 6], "length")]


def test_request_body():
    body = REQUEST.to_json()
    assert body["input_ids"] == [5, 6, 7] and body["return_logprob"] is True and body["rid"] == "life/0/1/p7/"
    assert body["sampling_params"] == {"max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1,
                                       "min_p": 0.0, "n": 2, "sampling_seed": [11, 12]}
    without = GenerateRequest("r/", REQUEST.input_ids, Sampling(4, stop=("\n",), stop_token_ids=(9,))).to_json()
    assert "sampling_seed" not in without["sampling_params"]
    assert without["sampling_params"]["stop"] == ["\n"] and without["sampling_params"]["stop_token_ids"] == [9]


def test_good_answer():
    first, second = parse_generate(GOOD, REQUEST, 10)
    assert first.response_ids.dtype == np.int32 and first.response_ids.tolist() == [1, 2]
    assert first.logprobs.dtype == np.float32 and first.logprobs.tolist() == [-1.5, -2.5]
    assert (first.finish, second.finish, first.cached_tokens) == ("stop", "length", 2)
    assert second.versions == [("life:3", 0, 4)]
    spans = copy.deepcopy(GOOD)
    spans[1]["meta_info"]["weight_versions"] = [{"version": "life:3", "start": 0, "end": 1},
                                                {"version": "life:4", "start": 1, "end": 4}]
    assert parse_generate(spans, REQUEST, 10)[1].versions == [("life:3", 0, 1), ("life:4", 1, 4)]
    one = GenerateRequest("r/", REQUEST.input_ids, Sampling(4))
    assert len(parse_generate(GOOD[0], one, 10)) == 1  # SGLang answers n=1 with an object


def _broken(change):
    answer = copy.deepcopy(GOOD)
    return change(answer) or answer


def _put(key, value):
    return lambda a: a[0]["meta_info"].__setitem__(key, value)


@pytest.mark.parametrize("change", [
    lambda a: a[:1],
    lambda a: {"error": "no"},
    lambda a: "text",
    lambda a: [None, None],
    lambda a: a[0].pop("output_ids") and None,
    lambda a: a[0].__setitem__("output_ids", [1]),
    lambda a: a[0].__setitem__("output_ids", [1, 7]),
    lambda a: a[0].__setitem__("output_ids", [1.0, 2.0]),
    lambda a: a[0].__setitem__("output_ids", [True, True]),
    lambda a: a[0].__setitem__("output_ids", "12"),
    lambda a: a[0].update(_item([])),
    lambda a: a[0].update(_item([1, 2, 3, 4, 5])),
    lambda a: a[0].update(_item([1, 10])),
    lambda a: a[0].update(_item([-1, 1])),
    lambda a: a[0].update(_item([2**70, 1])),
    lambda a: a[0].update(_item([1], finish="tired")),
    _put("prompt_tokens", 4),
    _put("output_token_logprobs", [[float("nan"), 1, None], [-1.0, 2, None]]),
    _put("output_token_logprobs", [[float("-inf"), 1, None], [-1.0, 2, None]]),
    _put("output_token_logprobs", [[0.5, 1, None], [-1.0, 2, None]]),
    _put("output_token_logprobs", [[None, 1, None], [-1.0, 2, None]]),
    _put("output_token_logprobs", [[-1.0, 1, None]]),
    _put("output_token_logprobs", None),
    _put("weight_versions", [{"version": "life:3", "start": 0, "end": 1}]),
    _put("weight_versions", [{"version": "life:3", "start": 1, "end": 2}]),
    _put("weight_versions", [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": 2}]),
])
def test_bad_answers_are_refused(change):
    with pytest.raises(BadAnswer):
        parse_generate(_broken(change), REQUEST, 10)


def test_versions():
    assert parse_version(format_version("local.0.ab12", 7)) == ("local.0.ab12", 7)
    assert parse_version("default") is None and parse_version("own-0.1-2-99") is None and parse_version("a:b") is None


@pytest.mark.parametrize("or_newer, versions, good", [
    (False, ["life:5"], True),
    (False, ["life:4"], False),
    (False, ["life:6"], False),
    (False, ["life:5", "life:4"], False),
    (False, ["other:5"], False),
    (False, ["default"], False),
    (True, ["life:5", "life:6"], True),
    (True, ["life:4", "life:5"], False),
    (True, ["other:5"], False),
])
def test_expected_versions(or_newer, versions, good):
    spans = [(version, at, at + 1) for at, version in enumerate(versions)]
    expected = Expected("life:5", or_newer)
    if good:
        expected.check(spans)
    else:
        with pytest.raises(WrongVersion):
            expected.check(spans)


def test_model_info_needs_both_fields():
    assert ModelInfo.from_json({"model_path": "m", "weight_version": "v"}).weight_version == "v"
    for answer in ({"model_path": "m"}, "text", None):
        with pytest.raises(BadAnswer):
            ModelInfo.from_json(answer)


ROUTED = GenerateRequest("r/", REQUEST.input_ids, Sampling(4), routing=RoutingShape(2, (0, 1), 8, 2))


def _routed(ids, finish="stop", rows=None):
    item = _item(ids, finish)
    tokens = 3 + len(ids) - 1 if rows is None else rows
    chosen = np.tile(np.arange(tokens * 4, dtype=np.int32).reshape(tokens, 2, 2) % 8, 1)
    item["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    return item


def test_routed_experts():
    assert ROUTED.to_json()["return_routed_experts"] is True and "return_routed_experts" not in REQUEST.to_json()
    (found,) = parse_generate(_routed([1, 2]), ROUTED, 10)
    assert found.experts.dtype == np.uint8 and found.experts.shape == (4, 2, 2)
    assert found.experts[3].tolist() == [[4, 5], [6, 7]]
    assert parse_generate(_routed([1, 2]), GenerateRequest("r/", REQUEST.input_ids, Sampling(4)), 10)[0].experts is None
    assert parse_generate(_item([1], "abort"), ROUTED, 10)[0].experts is None
    for wrong, words in ((_item([1, 2]), "--enable-return-routed-experts"), (_routed([1, 2], rows=5), "80 bytes")):
        with pytest.raises(BadAnswer, match=words):
            parse_generate(wrong, ROUTED, 10)


def test_a_continuation_brings_the_experts_of_the_whole():
    begun, more = (Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), finish, [], 0,
                              np.zeros((rows, 1, 2)))
                   for ids, finish, rows in (([1, 2], "abort", 4), ([3], "stop", 5)))
    assert len(begun.then(more).experts) == 5
