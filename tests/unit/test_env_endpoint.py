"""The OpenAI-compatible endpoint: answers, errors in OpenAI's form, streams, keys."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from chat_templates import TOOLS, chat_of
from conversations import WIDE, Speaker

from megarl.errors import MachineFault
from megarl.rollout.environments.endpoint import Endpoint
from megarl.rollout.environments.episode import Episode, Limits

USER = [{"role": "user", "content": "what is 1+2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Quiet:
    """Chance that never ends a reply otherwise and takes the tokeniser's own tokens."""

    def random(self, size: int | None = None) -> Any:
        return 0.4 if size is None else np.full(size, 0.5)


def speaking(*replies: str) -> Speaker:
    speaker, left = Speaker("qwen2.5", Quiet()), list(replies)
    speaker.words = lambda: left.pop(0)
    return speaker


def talk(*bodies: Any, speaker: Any = None, limits: Limits = WIDE, path: str = "/chat/completions",
         key: str | None = None) -> tuple[list[tuple[int, Any]], Episode]:
    """Send bodies one after the other; (status, JSON or text) of each."""
    async def run() -> tuple[list[tuple[int, Any]], Episode]:
        endpoint, answers = Endpoint(), []
        episode = Episode(chat_of("qwen2.5"), speaker or speaking("three"), limits, 4, "e")
        async with endpoint.open(episode) as (url, token), aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key or token}"}) as session:
            assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
            for body in bodies:
                how = {"data": body} if isinstance(body, bytes) else {"json": body}
                async with session.request("GET" if body is None else "POST", url + path, **how) as response:
                    text = await response.text()
                    answers.append((response.status, json.loads(text) if "json" in response.content_type else text))
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            async with session.post(f"{url}/chat/completions", json={"messages": USER}) as response:
                assert response.status == 401  # the episode is over
        await endpoint.close()
        return answers, episode

    return asyncio.run(run())


def test_an_answer_in_full() -> None:
    speaker = speaking("three")
    [(status, answer)], episode = talk({"model": "any", "messages": USER, "max_tokens": 50}, speaker=speaker)
    (asked, done), = speaker.asks
    assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "any"
    assert answer["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "three"},
                                  "finish_reason": "stop", "logprobs": None}]
    tokens = len(done.response_ids)
    assert answer["usage"] == {"prompt_tokens": len(asked), "completion_tokens": tokens,
                               "total_tokens": len(asked) + tokens, "prompt_tokens_details": {"cached_tokens": 0}}
    assert len(episode.turns) == 1


def test_tool_calls() -> None:
    [(_, answer)], _ = talk({"messages": USER, "tools": TOOLS, "tool_choice": "auto"}, speaker=speaking(CALL))
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["type"] == "function" and len(call["id"]) == 9
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    [(_, answer)], _ = talk({"messages": USER, "tools": TOOLS, "tool_choice": "none"}, speaker=speaking(CALL))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}


def test_a_stream_is_the_answer_in_one_piece() -> None:
    body = {"messages": USER, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    [(status, text)], _ = talk(body, speaker=speaking("I add. " + CALL))
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and lines[-1] == "[DONE]"
    first, last, usage = (json.loads(line) for line in lines[:-1])
    assert len({chunk["id"] for chunk in (first, last, usage)}) == 1
    delta = first["choices"][0]["delta"]
    assert delta["role"] == "assistant" and delta["content"] == "I add."
    assert delta["tool_calls"][0]["index"] == 0 and delta["tool_calls"][0]["function"]["name"] == "add"
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0


def test_models() -> None:
    [(status, answer)], _ = talk(None, path="/models")
    assert status == 200 and [model["id"] for model in answer["data"]] == ["policy"]
    [(status, answer)], _ = talk(None, path="/models", key="guess")
    assert status == 401


@pytest.mark.parametrize("body, told", [
    (b"{", "not JSON"), ([1], "must be a JSON object"), ({}, "messages must be a list"),
    ({"messages": []}, "messages must be a list"), ({"messages": ["hello"]}, "is not a chat message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only content of type text"),
    ({"messages": USER, "n": 2}, "n=2 is not supported"),
    ({"messages": USER, "logprobs": True}, "logprobs=True is not supported"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format="),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice='required' is not supported"),
    ({"messages": USER, "max_tokens": 0.5}, "max_tokens=0.5 is no number"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_tokens=0 is no number"),
    (b"[" * 10**5, "not JSON"), ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "of type text"),
    *[({"messages": USER, "stop": stop}, "stop=") for stop in ("", 5, [""], [1], {"a": 1})],
    ({"messages": USER, "tools": "add"}, "tools='add' is of another form"),
    ({"messages": USER, "tools": [1]}, "messages or tools are of another form"),
    ({"messages": USER, "stream": True, "stream_options": "usage"}, "stream_options='usage' is of another form"),
    *[({"messages": [*USER, {"role": "assistant", "tool_calls": calls}]}, "messages or tools are of another form")
      for calls in ("add", [1], [{"id": "1"}], [{"function": {"name": "add", "arguments": "{"}}])]])
def test_what_cannot_be_had_is_refused(body: Any, told: str) -> None:
    [(status, answer)], episode = talk(body)
    assert status == 400 and told in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error" and episode.turns == []


def test_halves_of_characters_pass() -> None:
    half = {"model": "\ud83d", "messages": [{"role": "user", "content": "half \ud83d"}]}
    answers, episode = talk(half, {**half, "stream": True}, speaker=speaking("one", "two"))
    assert [status for status, _ in answers] == [200, 200] and "two" in answers[1][1]
    assert len(episode.turns) == 2


def test_a_key_of_no_episode() -> None:
    [(status, answer)], episode = talk({"messages": USER}, key="guess")
    assert status == 401 and answer["error"]["code"] == "invalid_api_key" and episode.turns == []


def test_sampling_is_the_run_s_affair(caplog: pytest.LogCaptureFixture) -> None:
    hot = {"messages": USER, "temperature": 0.2, "top_p": 0.5, "seed": 3}
    answers, _ = talk(hot, hot, speaker=speaking("one", "two"))
    assert [status for status, _ in answers] == [200, 200]
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and "temperature of chat requests has no effect" in told[0]


def test_a_full_conversation_is_openai_s_error() -> None:
    [(status, answer)], episode = talk({"messages": USER}, limits=Limits(10, 10, 10, 10))
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded" and episode.cut


@pytest.mark.parametrize("fault", [True, False])
def test_engines_that_fail_are_the_server_s_fault(fault: bool) -> None:
    async def broken(ask: Any) -> None:
        if fault:
            raise MachineFault("no engine holds this run's weights")

    [(status, answer)], episode = talk({"messages": USER}, speaker=broken)
    assert status == 503 and answer["error"]["type"] == "server_error"
    assert isinstance(episode.fault, MachineFault) == fault


def test_who_hangs_up_takes_the_request_along() -> None:
    async def run() -> None:
        endpoint, ended = Endpoint(), asyncio.Event()

        async def slow(ask: Any) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.set()
                raise

        episode = Episode(chat_of("qwen2.5"), slow, WIDE, 4, "e")
        async with endpoint.open(episode) as (url, token):
            timeout = aiohttp.ClientTimeout(total=0.3)
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=timeout) as session:
                with pytest.raises(TimeoutError):
                    await session.post(f"{url}/chat/completions", json={"messages": USER})
            await asyncio.wait_for(ended.wait(), 5)
        await endpoint.close()

    asyncio.run(run())
