"""What /generate accepts, and how it refuses the rest."""

import pytest

from megarl.rollout.embedded.requests import BadRequest, Limits, Params, parse_generate

LIMITS = Limits(vocab=50, context=20)


def _parse(**body):
    return parse_generate(body, LIMITS, None)


def test_one_prompt_many_prompts_and_samples():
    one = _parse(input_ids=[1, 2], rid="a", sampling_params={"max_new_tokens": 3, "sampling_seed": 9})
    assert one.single and not one.return_logprob
    (group,) = one.groups
    assert group.params == Params(max_new_tokens=3, seeds=(9,)) and group.prompt_ids.tolist() == [1, 2]
    assert [(s.rid, s.seed) for s in group.sequences] == [("a", 9)]
    assert not _parse(input_ids=[[1, 2]], sampling_params={"max_new_tokens": 3}).single
    many = _parse(input_ids=[[1], [2, 3]], rid=["a", "b"], return_logprob=True, sampling_params=[
        {"n": 2, "max_new_tokens": 3, "sampling_seed": [5, 2**64 - 1]},
        {"n": 2, "max_new_tokens": 4, "sampling_seed": -1}])
    assert many.return_logprob and not many.single
    assert [(s.rid, s.seed) for g in many.groups for s in g.sequences] == [
        ("a_0", 5), ("a_1", 2**64 - 1), ("b_0", 2**64 - 1), ("b_1", 0)]


def test_neutral_values_of_what_is_not_there_are_accepted():
    params = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "regex": None, "stop": None,
              "temperature": None, "stop_token_ids": None, "max_new_tokens": 2, "skip_special_tokens": True}
    (group,) = _parse(input_ids=[1], stream=False, top_logprobs_num=0, logprob_start_len=-1, priority=3,
                      sampling_params=params).groups
    assert group.params.temperature == 1.0 and group.params.stop == ()


@pytest.mark.parametrize("body, message", [
    ({}, "Either text or input_ids"),
    ({"input_ids": [1], "text": "a"}, "Either text or input_ids"),
    ({"text": "a"}, "needs a tokenizer.json"),
    ({"input_ids": []}, "non-empty list of integers"),
    ({"input_ids": [[1], []]}, "non-empty list of integers"),
    ({"input_ids": [1, 2.0]}, "non-empty list of integers"),
    ({"input_ids": [True]}, "non-empty list of integers"),
    ({"input_ids": [1, 50]}, "outside the vocabulary of 50"),
    ({"input_ids": [-1]}, "outside the vocabulary of 50"),
    ({"input_ids": [1] * 15, "sampling_params": {"max_new_tokens": 6}}, "requested a total of 21 tokens: 15 tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1, got 0"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be non-negative, got -1"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature must be non-negative"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, r"top_p must be in \(0, 1\], got 0"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be -1"),
    ({"input_ids": [1], "sampling_params": {"min_p": 2}}, r"min_p must be in \[0, 1\]"),
    ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be a positive integer"),
    ({"input_ids": [1], "sampling_params": {"n": 2, "sampling_seed": [1]}}, "a list of n=2 integers"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": "x"}}, "sampling_seed must be an integer"),
    ({"input_ids": [1], "sampling_params": {"top": 1}}, "Unexpected keyword argument 'top'"),
    ({"input_ids": [1], "sampling_params": {"presence_penalty": 0.5}}, "presence_penalty=0.5 is not supported"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop strings need a tokenizer.json"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, "stop_token_ids must be a list of integers"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": 3}}, "stop_token_ids must be"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [1 << 64]}}, "stop_token_ids must be a list of integers"),
    ({"input_ids": [1], "sampling_params": {"stop": [3]}}, "stop must be a list of non-empty strings"),
    ({"input_ids": [1], "sampling_params": "x"}, "sampling_params must be an object"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "a list with one per prompt"),
    ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1, "max_new_tokens": 1}, {"n": 2, "max_new_tokens": 1}]},
     "parallel_sample_num"),
    ({"input_ids": [[1], [2]], "rid": ["a"], "sampling_params": {"max_new_tokens": 1}}, "rid must be"),
    ({"input_ids": [1], "stream": True}, "stream is not supported"),
    ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
    ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
])
def test_refusals(body, message):
    with pytest.raises(BadRequest, match=message):
        parse_generate(body, LIMITS, None)
