"""Conversations as token ids, with templates in the form of six families."""

from __future__ import annotations

import numpy as np
import pytest
from chat_templates import STOPS, TEMPLATES, TOOLS, chat_of, tokenizer_of

from megarl.errors import UserMistake
from megarl.rollout.environments.chat import Chat, Refused

USER = [{"role": "user", "content": "what is 1+2?"}]
CALLS = {  # not laid out as the template would lay them out
    "qwen2.5": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>',
    "qwen3": '<think>\nhm hm\n</think>\n\n<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b":2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "deepseek": 'I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b":2}'
                '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm": "\n<think>hm</think>\n<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n<arg_key>a</arg_key>\n"
           "<arg_value>1</arg_value>\n</tool_call>"}
AFTER_CALL = {  # by hand: what stands between the sampled end of a turn and the next one, for the tool's answer "3"
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|><|start_header_id|>assistant'
              "<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": 3, "call_id": "ID"}[/TOOL_RESULTS]',
    "deepseek": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    "glm": "\n<tool_response>\n3\n</tool_response><|assistant|>"}
END_OF_CALL = {family: stops[0] for family, stops in STOPS.items()} | {"glm": "<|observation|>"}


def ids(family: str, text: str) -> np.ndarray:
    return np.array(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"], np.int32)


def tool_message(said) -> dict:
    return {"role": "tool", "content": "3", "name": "add", "tool_call_id": said.parsed.calls[0].id}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_tool_call_and_its_answer_are_appended(family: str) -> None:
    chat = chat_of(family)
    prompt = chat.open(USER, TOOLS)
    assert prompt.ids.tolist() == ids(family, prompt.text).tolist()
    said = chat.read(ids(family, CALLS[family] + END_OF_CALL[family]), TOOLS, key=7)
    assert [(call.name, call.arguments) for call in said.parsed.calls] == [("add", {"a": 1, "b": 2})]
    assert len(said.parsed.calls[0].id) == 9 and said.text == CALLS[family]
    after, kept = chat.extend(prompt, said, [tool_message(said)], TOOLS)
    expected = AFTER_CALL[family].replace("ID", said.parsed.calls[0].id)
    assert kept
    assert after.ids.tolist() == [*prompt.ids, *said.ids, *ids(family, expected)]


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_reply_that_was_cut_gets_the_end_of_its_turn(family: str) -> None:
    """No stop token was sampled: the template's own end of a turn is context."""
    chat = chat_of(family)
    prompt = chat.open(USER)
    body = "\n<think></think>\nit is" if family == "glm" else "<think>\nhm\n</think>\n\nit is" * (family == "qwen3") \
        or "it is"
    said = chat.read(ids(family, body))
    follow = [{"role": "user", "content": "go on"}]
    after, kept = chat.extend(prompt, said, follow)
    if family == "qwen3":  # its thoughts go when the user speaks
        assert not kept and "hm" not in after.text
        return
    end = {"qwen2.5": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>",
           "glm": "<|user|>"}[family]
    assert kept and after.ids[:len(prompt.ids) + len(said.ids)].tolist() == [*prompt.ids, *said.ids]
    assert after.ids[len(prompt.ids) + len(said.ids)] == ids(family, end)[0]


def test_another_end_than_the_templates_is_kept() -> None:
    """<|endoftext|> where the template has <|im_end|>: what was sampled stays, and the template's end follows."""
    chat = chat_of("qwen2.5")
    prompt = chat.open(USER)
    said = chat.read(ids("qwen2.5", "three<|endoftext|>"))
    assert said.text == "three"
    after, kept = chat.extend(prompt, said, [{"role": "user", "content": "ok"}])
    assert kept and after.ids.tolist() == [*prompt.ids, *said.ids, *ids(
        "qwen2.5", "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n")]


def test_sampled_ids_are_kept_where_the_tokenizer_would_choose_others() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "function"]
    assert letters != ids("qwen2.5", "function").tolist()
    chat = chat_of("qwen2.5")
    prompt = chat.open(USER)
    said = chat.read(np.array([*letters, *ids("qwen2.5", "<|im_end|>")], np.int32))
    after, kept = chat.extend(prompt, said, [{"role": "user", "content": "ok"}])
    assert kept and after.ids[len(prompt.ids):][:len(letters)].tolist() == letters
    assert said.text == "function"


def test_bytes_that_are_no_text_are_kept() -> None:
    """Half a character decodes to the replacement character; its ids stay."""
    tokenizer = tokenizer_of("qwen2.5")
    half = ids("qwen2.5", "é")[:1]
    assert tokenizer.decode(half.tolist()) == "\ufffd"
    chat = chat_of("qwen2.5")
    prompt = chat.open(USER)
    said = chat.read(np.append(half, ids("qwen2.5", "<|im_end|>")))
    after, kept = chat.extend(prompt, said, [{"role": "user", "content": "ok"}])
    assert kept and after.ids[len(prompt.ids)] == half[0]


def test_thoughts_stay_between_tool_calls_and_split_at_the_user() -> None:
    chat = chat_of("qwen3")
    prompt = chat.open(USER, TOOLS)
    said = chat.read(ids("qwen3", CALLS["qwen3"] + "<|im_end|>"), TOOLS)
    after, kept = chat.extend(prompt, said, [tool_message(said)], TOOLS)
    assert kept
    second = chat.read(ids("qwen3", "<think>\nthree it is\n</think>\n\nIt is 3.<|im_end|>"), TOOLS)
    fresh, kept = chat.extend(after, second, [{"role": "user", "content": "thanks"}], TOOLS)
    assert not kept and "hm hm" not in fresh.text and "three it is" not in fresh.text and "It is 3." in fresh.text
    assert fresh.ids.tolist() == ids("qwen3", fresh.text).tolist()


def test_qwen3_without_thinking_splits_at_tool_calls() -> None:
    """Its template writes an empty thought before a reply and takes it away from it later: the ids cannot be kept."""
    chat = chat_of("qwen3", enable_thinking=False)
    prompt = chat.open(USER, TOOLS)
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    said = chat.read(ids("qwen3", CALLS["qwen2.5"] + "<|im_end|>"), TOOLS)
    _, kept = chat.extend(prompt, said, [tool_message(said)], TOOLS)
    assert not kept


def test_mistral_moves_its_tools() -> None:
    """They stand before the last user message: its text changes when the user speaks again, and not for a tool."""
    chat = chat_of("mistral")
    prompt = chat.open(USER, TOOLS)
    said = chat.read(ids("mistral", CALLS["mistral"] + "</s>"), TOOLS)
    after, kept = chat.extend(prompt, said, [tool_message(said)], TOOLS)
    assert kept
    second = chat.read(ids("mistral", " three</s>"), TOOLS)
    fresh, kept = chat.extend(after, second, [{"role": "user", "content": "and 3+4?"}], TOOLS)
    assert not kept and fresh.text.count("[AVAILABLE_TOOLS]") == 1
    plain = chat.open(USER)
    assert chat.extend(plain, chat.read(ids("mistral", " three</s>")), [{"role": "user", "content": "ok"}])[1]


def test_a_template_that_drops_thoughts_at_once_splits() -> None:
    """As DeepSeek-R1's: the reply's own rendering says less than the reply; nothing else of the text changes."""
    chat = chat_of("deepseek", strip_thoughts=True)
    prompt = chat.open(USER)
    said = chat.read(ids("deepseek", "<think>hm</think>3<｜end▁of▁sentence｜>"))
    fresh, kept = chat.extend(prompt, said, [{"role": "user", "content": "ok"}])
    assert not kept and "hm" not in fresh.text
    plain = chat.read(ids("deepseek", "3<｜end▁of▁sentence｜>"))
    assert chat.extend(prompt, plain, [{"role": "user", "content": "ok"}])[1]


def test_an_unreadable_call_stays_as_it_is() -> None:
    chat = chat_of("qwen2.5")
    prompt = chat.open(USER, TOOLS)
    said = chat.read(ids("qwen2.5", '<tool_call>{"name": "add"<|im_end|>'), TOOLS)
    assert said.parsed.errors and said.message["content"] == '<tool_call>{"name": "add"'
    after, kept = chat.extend(prompt, said, [{"role": "user", "content": "no JSON"}], TOOLS)
    assert kept and after.text.count('<tool_call>{"name": "add"<|im_end|>') == 1


def test_several_new_messages_at_once() -> None:
    chat = chat_of("qwen2.5")
    prompt = chat.open(USER, TOOLS)
    two = CALLS["qwen2.5"] + '\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
    said = chat.read(ids("qwen2.5", two), TOOLS)
    answers = [{"role": "tool", "content": text, "tool_call_id": call.id}
               for text, call in zip("37", said.parsed.calls, strict=True)]
    after, kept = chat.extend(prompt, said, [*answers, {"role": "user", "content": "so?"}], TOOLS)
    assert kept and after.ids.tolist() == [*prompt.ids, *said.ids, *ids(
        "qwen2.5", "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")]


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(Refused, match="must alternate"):
        chat_of("mistral").open([{"role": "assistant", "content": "I begin"}])


def test_a_tokenizer_without_a_template_is_a_mistake() -> None:
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(UserMistake, match="no chat template"):
        Chat(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer))
