"""Prompts: order, epochs, weights, length filter, chat templates, and every mistake in a data file."""

import json
import threading
import time
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.config.schema import DataConfig, EvalSetConfig
from megarl.data.prompts import PromptStream, draws_before, load_eval_set, shuffled
from megarl.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from megarl.errors import UserMistake

TEMPLATE = ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
            "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
            "{% if quiet %} <quiet>{% endif %}")
WORDS = ["<unk>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>", "<quiet>", *(f"w{k}" for k in range(50))]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A word-level tokenizer that puts <bos> in front of text; its file asks for truncation, which must not happen."""
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    words.enable_truncation(3)
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
                            chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(str(tokenizer_dir))


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count, words=2):
    return [{"prompt": " ".join(f"w{(k + j) % 50}" for j in range(words)), "label": k, "id": f"r{k}"}
            for k in range(count)]


def data(*paths, **changes):
    """A DataConfig over files; a tuple gives (path, weight)."""
    sources = [{"path": str(one[0]), "weight": one[1]} if isinstance(one, tuple) else {"path": str(one)}
               for one in paths]
    return TypeAdapter(DataConfig).validate_python({"sources": sources, **changes})


def draw(config, tokenizer, count, seed=0, start=0):
    with PromptStream(config, tokenizer, seed) as stream:
        return [stream.at(position) for position in range(start, start + count)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_fields_of_a_prompt(tmp_path, tokenizer, suffix):
    path = write(tmp_path / f"sums{suffix}", [{"prompt": "w1 w2", "label": {"a": [1]}, "level": 3, "tag": "x"}])
    prompt, = draw(data(path), tokenizer, 1)
    assert prompt.token_ids.tolist() == [1, WORDS.index("w1"), WORDS.index("w2")]  # <bos> in front
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.text, prompt.label, prompt.extra) == ("w1 w2", {"a": [1]}, {"level": 3, "tag": "x"})
    assert (prompt.position, prompt.epoch, prompt.index, prompt.source) == (0, 0, 0, "sums")


def test_every_epoch_has_every_row_once_in_a_new_order(tmp_path, tokenizer):
    config = data(write(tmp_path / "a.jsonl", texts(20)))
    drawn = draw(config, tokenizer, 60)
    orders = [[p.index for p in drawn[k * 20:(k + 1) * 20]] for k in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(20))}) == 4
    assert [p.epoch for p in drawn] == [0] * 20 + [1] * 20 + [2] * 20
    assert [p.label for p in drawn] == [p.index for p in drawn]
    assert [p.index for p in draw(config, tokenizer, 20, seed=1)] != orders[0]
    plain = data(tmp_path / "a.jsonl", shuffle=False)
    assert [p.index for p in draw(plain, tokenizer, 40)] == list(range(20)) * 2


def test_position_alone_decides(tmp_path, tokenizer):
    """Any order of asking, and a stream made anew in the middle of the run, give the same prompts."""
    config = data((write(tmp_path / "a.jsonl", texts(20)), 2.0), (write(tmp_path / "b.jsonl", texts(7, 9)), 1.0),
                  max_prompt_tokens=9)
    with pytest.raises(UserMistake, match="all 7 prompts"):  # nine words and <bos>
        PromptStream(config, tokenizer, 0)
    rows = texts(20)
    for k in (3, 4, 11):
        rows[k]["prompt"] = "w1 " * 30
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "b.jsonl", texts(7))
    drawn = draw(config, tokenizer, 100)
    with PromptStream(config, tokenizer, 0, ahead=0) as stream:
        for position in (99, 0, 57, 3, 98, 12):
            again, want = stream.at(position), drawn[position]
            assert (again.epoch, again.index, again.source) == (want.epoch, want.index, want.source)
    assert [p.index for p in draw(config, tokenizer, 10, start=60)] == [p.index for p in drawn[60:70]]
    kept = [p.index for p in drawn if p.source == "a" and p.epoch == 1]
    assert sorted(kept) == [k for k in range(20) if k not in (3, 4, 11)]


def test_weights_are_shares_of_the_draws(tmp_path, tokenizer):
    paths = [write(tmp_path / f"{name}.jsonl", texts(10)) for name in "abc"]
    config = data((paths[0], 3.0), (paths[1], 1.0), (paths[2], 1.0))
    drawn = draw(config, tokenizer, 50)
    assert Counter(p.source for p in drawn) == {"a": 30, "b": 10, "c": 10}
    for step in range(0, 50, 10):  # the mixture is the same all along
        assert Counter(p.source for p in drawn[step:step + 10]) == {"a": 6, "b": 2, "c": 2}
    assert max(p.epoch for p in drawn if p.source == "a") == 2
    assert {p.epoch for p in drawn if p.source != "a"} == {0}
    for name in "abc":  # each source in its own epochs
        own = [p.index for p in drawn if p.source == name]
        assert all(sorted(own[k:k + 10]) == list(range(10)) for k in range(0, len(own), 10))


def test_draws_before_by_hand():
    assert [draws_before(d, [1.0, 1.0]) for d in range(5)] == [[0, 0], [0, 1], [1, 1], [1, 2], [2, 2]]
    assert draws_before(10, [0.7, 0.2, 0.1]) in ([7, 2, 1], [6, 2, 2], [6, 3, 1], [7, 1, 2])  # 0.7 is not 7/10
    for d in range(200):
        steps = np.array(draws_before(d + 1, [0.7, 0.2, 0.1])) - draws_before(d, [0.7, 0.2, 0.1])
        assert sorted(steps) == [0, 0, 1]
    assert draws_before(10**9, [1.0, 3.0]) == [250_000_000, 750_000_000]


def test_shuffle_does_not_depend_on_numpy():
    """Worked out with Python integers: rows sorted by SplitMix64's output for key + (row) * gamma."""
    from megarl.data.sample import sample_seed

    def hashed(row):
        mask = 2**64 - 1
        z = (sample_seed(5, 1, 2) + row * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    assert shuffled(40, 5, 1, 2).tolist() == sorted(range(40), key=hashed)


def test_filter_reports_what_it_dropped(tmp_path, tokenizer):
    rows = texts(6)
    rows[2]["prompt"], rows[4]["prompt"] = "w1 " * 7, "w1 " * 12
    config = data(write(tmp_path / "a.jsonl", rows), max_prompt_tokens=8, shuffle=False)
    with PromptStream(config, tokenizer, 0) as stream:
        assert [stream.at(k).index for k in range(10)] == [0, 1, 2, 3, 5, 0, 1, 2, 3, 5]
        report, = stream.report()
    assert (report.rows, report.scanned, report.dropped, report.longest) == (6, 6, 1, 13)
    assert report.describe() == (f"a: 1 of 6 prompts dropped, longer than 8 tokens "
                                 f"(longest 13: {tmp_path / 'a.jsonl'} line 5)")


def test_chat_messages_and_templates(tmp_path, tokenizer):
    chat = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": chat, "label": 1}, {"prompt": "w4", "label": 2}])

    def tokens(**changes):
        drawn = draw(data(path, shuffle=False, **changes), tokenizer, 2)
        return [" ".join(WORDS[token] for token in prompt.token_ids) for prompt in drawn]

    assert tokens() == ["<system> w1 <user> w2 w3 <assistant>", "<bos> w4"]
    assert tokens(chat_template="always") == ["<system> w1 <user> w2 w3 <assistant>", "<user> w4 <assistant>"]
    assert tokens(chat_template_options={"quiet": True})[0].endswith("<assistant> <quiet>")
    with pytest.raises(UserMistake, match="a.jsonl line 1: the prompt is chat messages"):
        tokens(chat_template="never")


def test_tokenised_ahead_and_no_further(tmp_path, tokenizer):
    config = data(write(tmp_path / "a.jsonl", texts(500)))
    with PromptStream(config, tokenizer, 0, ahead=40) as stream:
        wait_until(lambda: stream.report()[0].scanned == 41)  # draw 0 and 40 more
        stream.at(100)
        wait_until(lambda: stream.report()[0].scanned == 141)
    with PromptStream(config, tokenizer, 0, start=300, ahead=10) as resumed:
        wait_until(lambda: resumed.report()[0].scanned == 311)
    assert not [thread for thread in threading.enumerate() if thread.name == "tokenize-ahead"]
    assert resumed.at(400).position == 400  # still works, without look-ahead
    assert resumed.report()[0].scanned == 401


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def test_a_mistake_found_ahead_is_raised_by_the_next_draw(tmp_path, tokenizer):
    config = data(write(tmp_path / "a.jsonl", [*texts(50), {"prompt": 7, "label": 1}]), shuffle=False)
    stream = PromptStream(config, tokenizer, 0, ahead=60)
    wait_until(lambda: not stream._thread.is_alive())
    with pytest.raises(UserMistake, match="a.jsonl line 51: the prompt is 7, neither"):
        stream.at(0)
    stream.close()


LINES = {
    "bad JSON": ('{"prompt": "w1", "label": 1}\n\n{"prompt": "w1" "label": 1}\n',
                 "a.jsonl line 3: not JSON: Expecting"),
    "not UTF-8": (b'{"prompt": "\xff", "label": 1}\n', "a.jsonl line 1: not JSON: not UTF-8"),
    "a list": ('["w1"]\n', "a.jsonl line 1: not a JSON object"),
    "no prompt": ('{"prompt": "w1", "label": 1}\n{"question": "w1", "label": 1}\n',
                  "a.jsonl line 2: no column 'prompt'\n  remedy: its columns are question, label"),
    "no label": ('{"prompt": "w1"}\n', "a.jsonl line 1: no column 'label'"),
    "empty file": ("", "a.jsonl has no rows"),
    "blank lines": ("\n\n", "a.jsonl has no rows"),
    "a number": ('\n{"prompt": 3, "label": 1}\n', "line 2: the prompt is 3, neither text nor chat messages"),
    "no messages": ('{"prompt": [], "label": 1}\n', "line 1: the prompt is \\[\\], neither text nor chat messages"),
    "bad message": ('{"prompt": [{"role": "user", "content": [1]}], "label": 1}\n', "line 1: .*is not a chat message"),
    "template refuses": ('{"prompt": [{"role": "tool", "content": "w1"}], "label": 1}\n',
                         "line 1: the chat template refuses the messages: no tools here"),
    "half of a character": ('{"prompt": "w1 \\ud83d", "label": 1}\n',
                            r"a.jsonl line 1: the prompt has half of a character: '.ud83d'"),
    "no tokens": ('{"prompt": "", "label": 1}\n', "a.jsonl line 1: the prompt has no tokens"),
    "all too long": (json.dumps({"prompt": "w1 " * 30, "label": 1}) + "\n",
                     "a.jsonl: all 1 prompts are longer than data.max_prompt_tokens .* the longest has 31 tokens"),
}


@pytest.mark.parametrize("case", LINES)
def test_mistakes_in_a_file(tmp_path, tokenizer, case):
    content, message = LINES[case]
    (tmp_path / "a.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    if case == "no tokens":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")))
    with pytest.raises(UserMistake, match=message) as caught:
        PromptStream(data(tmp_path / "a.jsonl", max_prompt_tokens=20), tokenizer, 0)
    assert caught.value.remedy


def test_mistakes_about_the_file_itself(tmp_path, tokenizer):
    for name, message in (("gone.jsonl", "is not there"), ("a.csv", "neither .jsonl nor .parquet")):
        with pytest.raises(UserMistake, match=message) as caught:
            PromptStream(data(tmp_path / name), tokenizer, 0)
        assert caught.value.where == "data.sources.0.path"
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(UserMistake, match="a.parquet: not Parquet"):
        PromptStream(data(tmp_path / "a.parquet"), tokenizer, 0)
    write(tmp_path / "b.parquet", [{"question": "w1", "label": 1}])
    with pytest.raises(UserMistake, match="b.parquet: no column 'prompt'"):
        PromptStream(data(tmp_path / "b.parquet"), tokenizer, 0)
    write(tmp_path / "c.parquet", [{"prompt": "w1", "label": 1}, {"prompt": None, "label": 1}])
    with pytest.raises(UserMistake, match="c.parquet row 2: the prompt is None"):
        draw(data(tmp_path / "c.parquet", on_long_prompt="error"), tokenizer, 2)


def test_long_prompt_refused_at_once(tmp_path, tokenizer):
    rows = texts(300)
    rows[250]["prompt"] = "w1 " * 20
    config = data(write(tmp_path / "a.jsonl", rows), max_prompt_tokens=8, on_long_prompt="error")
    with pytest.raises(UserMistake, match=r"a.jsonl line 251: the prompt has 21 tokens, above data.max_prompt_tokens"):
        PromptStream(config, tokenizer, 0)


def test_tokenizer_without_a_template(tmp_path, tokenizer_dir):
    bare = load_tokenizer(str(tokenizer_dir))
    bare.chat_template = None
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "w1"}], "label": 1}])
    with pytest.raises(UserMistake, match=f"line 1: the tokenizer of {tokenizer_dir} has no chat template"):
        PromptStream(data(path), bare, 0)


def test_no_label_column(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "w1", "x": 1}])
    config = TypeAdapter(DataConfig).validate_python({"sources": [{"path": str(path), "label": ""}]})
    prompt, = draw(config, tokenizer, 1)
    assert prompt.label is None and prompt.extra == {"x": 1}


def test_eval_set(tmp_path, tokenizer):
    path = write(tmp_path / "test.jsonl", texts(5))
    config = data(path, max_prompt_tokens=8)
    prompts = load_eval_set(EvalSetConfig(path=str(path), limit=3), tokenizer, config)
    assert [(p.position, p.index, p.label, p.source) for p in prompts] == [(k, k, k, "test") for k in range(3)]
    assert prompts[1].extra == {"id": "r1"} and prompts[1].token_ids.tolist() == [1, 8, 9]
    assert len(load_eval_set(EvalSetConfig(path=str(path), name="held_out"), tokenizer, config)) == 5
    rows = texts(5)
    rows[4]["prompt"] = "w1 " * 20
    write(path, rows)
    with pytest.raises(UserMistake, match="test.jsonl line 5: the prompt has 21 tokens"):
        load_eval_set(EvalSetConfig(path=str(path)), tokenizer, config)
    with pytest.raises(UserMistake, match="gone.jsonl is not there"):
        load_eval_set(EvalSetConfig(path=str(tmp_path / "gone.jsonl")), tokenizer, config)


def test_tokenizer_of_a_checkpoint(tokenizer_dir, tokenizer, tmp_path):
    assert load_tokenizer(str(tokenizer_dir)).backend_tokenizer.truncation is None  # though the file asks for it
    assert tokenizer("w1 w2 w3 w4 w5")["input_ids"] == [1, 8, 9, 10, 11, 12]
    assert stop_token_ids(str(tokenizer_dir), tokenizer) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(str(tmp_path), tokenizer) == [2, 7, 9]
    assert decoder(tokenizer)(np.array([1, 8, 9, 2], np.int32)) == "w1 w2"
    with pytest.raises(UserMistake, match="has no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserMistake, match="is no directory"):
        load_tokenizer(str(tmp_path / "gone"))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserMistake, match="generation_config.json is not JSON"):
        stop_token_ids(str(tmp_path), tokenizer)
