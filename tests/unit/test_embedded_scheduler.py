"""Continuous batching: who is computed once, who ends when and why, what an abort or a retraction keeps."""

import numpy as np
import pytest
import torch
from embedded_parts import answer_of, ids_of, logprobs_of, run, scheduler_for, submit
from models import save_hf_model

from megarl.rollout.embedded.text import Text


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = save_hf_model("qwen3_moe", tmp_path_factory.mktemp("moe"))
    _tokenizer(folder)
    return folder


def _tokenizer(folder):
    """Tokens are words w0 .. w98, decoded with a space between them; w1 is the end of sequence, and special."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(99)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("w1", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w1"}')


def _body(prompt=(5, 6, 7), **params):
    return {"rid": "r", "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": True, **params}}


def test_a_group_s_prompt_is_computed_once(path):
    scheduler = scheduler_for(path, slots=3)
    prompt = list(range(2, 42))
    items = run(scheduler, {**_body(prompt, n=8, sampling_seed=list(range(8)))})
    assert scheduler.prefilled_tokens == 39  # the last token is each sample's own first step
    assert [item["meta_info"]["cached_tokens"] for item in items] == [0] + [39] * 7
    assert [item["meta_info"]["id"] for item in items] == [f"r_{number}" for number in range(8)]
    assert len({tuple(ids_of(item)) for item in items}) == 8
    for seed, item in enumerate(items):
        (alone,) = run(scheduler_for(path, slots=1), _body(prompt, sampling_seed=seed))
        assert ids_of(alone) == ids_of(item)
        np.testing.assert_allclose(logprobs_of(alone), logprobs_of(item), atol=1e-5)


def test_a_single_seed_counts_up_and_no_seed_is_random(path):
    scheduler = scheduler_for(path)
    counted = run(scheduler, _body(n=3, sampling_seed=10))
    listed = run(scheduler, _body(n=3, sampling_seed=[10, 11, 12]))
    assert [ids_of(item) for item in counted] == [ids_of(item) for item in listed]
    one, other = (run(scheduler, _body(sampling_seed=None))[0]["output_ids"] for _ in range(2))
    assert one != other


def test_a_continued_sequence_draws_as_the_whole_one(path):
    """Random numbers belong to positions: a response cut and sent again as prompt goes on as it would have."""
    scheduler = scheduler_for(path)
    whole = ids_of(run(scheduler, _body())[0])
    rest = ids_of(run(scheduler, _body((5, 6, 7, *whole[:5]), max_new_tokens=7))[0])
    assert whole[5:] == rest


def test_what_ends_a_sequence(path):
    scheduler, text = scheduler_for(path, text=Text.load(path)), Text.load(path)
    whole = run(scheduler, _body(), text=text)[0]
    ids = ids_of(whole)
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 12} and len(ids) == 12
    assert whole["meta_info"]["completion_tokens"] == 12 and whole["meta_info"]["prompt_tokens"] == 3
    assert whole["text"] == " ".join(f"w{token}" for token in ids)
    stop = next(token for token in ids[3:] if token not in ids[:3] and token != 1)
    at = ids.index(stop) + 1

    (stopped,) = run(scheduler, _body(ignore_eos=False, stop_token_ids=[98, stop]), text=text)
    assert ids_of(stopped) == ids[:at] and logprobs_of(stopped) == logprobs_of(whole)[:at]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == " ".join(f"w{token}" for token in ids[:at - 1])
    (ignored,) = run(scheduler, _body(stop_token_ids=[stop]), text=text)  # as in SGLang: ignore_eos ignores these too
    assert ids_of(ignored) == ids

    (last,) = run(scheduler, _body(ignore_eos=False, stop_token_ids=[stop], max_new_tokens=at), text=text)
    assert last["meta_info"]["finish_reason"]["type"] == "stop" and ids_of(last) == ids[:at]

    string = f"w{ids[at - 2]} w{stop}"  # spans two tokens
    (stopped,) = run(scheduler, _body(stop=["nothing", string]), text=text)
    assert ids_of(stopped) == ids[:at] and stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
    assert stopped["text"] == "".join(f"w{token} " for token in ids[:at - 2])


def test_the_model_s_own_end_of_sequence(path):
    scheduler = scheduler_for(path)
    items = run(scheduler, _body(n=40, sampling_seed=0, max_new_tokens=200, ignore_eos=False))
    for item in items:
        ids, finish = ids_of(item), item["meta_info"]["finish_reason"]
        assert (1 in ids) == (finish["type"] == "stop") and 1 not in ids[:-1]
        assert finish in ({"type": "stop", "matched": 1}, {"type": "length", "length": 200})
    assert sum(item["meta_info"]["finish_reason"]["type"] == "stop" for item in items) > 10


def test_more_sequences_than_slots_all_finish_alike(path):
    """Other slots, other batches, compaction in between: the same tokens."""
    source = np.random.default_rng(0)
    prompts = [source.integers(2, 99, source.integers(1, 40)).tolist() for _ in range(30)]
    params = [{"max_new_tokens": int(source.integers(1, 40)), "sampling_seed": seed, "ignore_eos": True}
              for seed in range(30)]
    results = [run(scheduler_for(path, slots=slots), {"rid": "r", "input_ids": prompts, "sampling_params": params})
               for slots in (3, 20, 64)]
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert ids_of(one) == ids_of(other)
            np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=1e-5)
    assert [len(item["output_ids"]) for item in results[0]] == [item["max_new_tokens"] for item in params]


def test_rows_follow_the_running_sequences_down(path):
    scheduler = scheduler_for(path, slots=64)
    rows = []
    decode = scheduler._decoder.decode
    scheduler._decoder.decode = lambda tokens, *rest: (rows.append(len(tokens)), decode(tokens, *rest))[1]
    params = [{"max_new_tokens": 2 if number < 50 else 6, "ignore_eos": True} for number in range(64)]
    run(scheduler, {"input_ids": [[4]] * 64, "sampling_params": params})
    assert rows == [64, 64, 16, 16, 16, 16]


def test_abort_keeps_what_there_is(path):
    scheduler = scheduler_for(path, slots=2)
    whole = ids_of(run(scheduler, _body())[0])
    generate = submit(scheduler, {**_body(), "input_ids": [[5, 6, 7]] * 4, "rid": ["a1", "a2", "b1", "b2"]})
    for _ in range(4):
        scheduler.step()
    scheduler.abort(lambda sequence: sequence.rid.startswith("a"))
    while scheduler.step():
        pass
    items = answer_of(generate)
    assert [item["meta_info"]["finish_reason"]["type"] for item in items] == ["abort", "abort", "length", "length"]
    assert [ids_of(item) for item in items] == [whole[:4], whole[:4], whole, whole]
    waiting = submit(scheduler, _body())
    scheduler.abort(lambda _: True)
    assert answer_of(waiting)[0]["output_ids"] == [] and not scheduler.step()
    assert answer_of(waiting)[0]["meta_info"]["weight_version"] == "v0"


def test_retraction_recomputes_and_goes_on(path):
    scheduler = scheduler_for(path, slots=4)
    whole = run(scheduler, _body(n=6, sampling_seed=1))
    generate = submit(scheduler, _body(n=6, sampling_seed=1))
    for _ in range(3):
        scheduler.step()
    assert not scheduler.flush() and scheduler.running == 4 and scheduler.waiting == 2
    scheduler.retract()
    assert scheduler.flush() and scheduler.running == 0 and scheduler.waiting == 6
    scheduler.set_version("v1")
    while scheduler.step():
        pass
    for number, (item, expected) in enumerate(zip(answer_of(generate), whole, strict=True)):
        assert ids_of(item) == ids_of(expected)
        np.testing.assert_allclose(logprobs_of(item), logprobs_of(expected), atol=1e-5)
        spans = [("v0", 0, 3), ("v1", 3, 12)] if number < 4 else [("v1", 0, 12)]
        assert [tuple(span.values()) for span in item["meta_info"]["weight_versions"]] == spans
        assert item["meta_info"]["num_retractions"] == (number < 4) and item["meta_info"]["weight_version"] == "v1"


def test_new_weights_reach_the_waiting_samples_of_a_group(path):
    """The prompt that was computed for a group's first samples is not used for later ones after an update."""
    scheduler = scheduler_for(path, slots=1)
    body = _body(range(2, 30), n=3, sampling_seed=1)
    generate = submit(scheduler, body)
    for _ in range(12):
        scheduler.step()  # the first sample
    weights = scheduler._decoder.weights
    with torch.inference_mode():
        for view in weights.views.values():
            view.mul_(1.3)
    weights.refresh()
    scheduler.forget()
    while scheduler.step():
        pass
    fresh = run(scheduler, body)
    assert [ids_of(item) for item in answer_of(generate)][1:] == [ids_of(item) for item in fresh][1:]
    assert [logprobs_of(item) for item in answer_of(generate)][1:] == [logprobs_of(item) for item in fresh][1:]
    assert ids_of(answer_of(generate)[0]) != ids_of(fresh[0])
