"""Episodes as samples: over random conversations with tool calls, at branches, limits and faults."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, TOOLS, chat_of, tokenizer_of
from conversations import PROMPT, WIDE, Companion, Speaker, check_tokens

from megarl.config.schema import EnvironmentConfig
from megarl.data.sample import sample_seed
from megarl.errors import MachineFault
from megarl.rollout.environments.episode import RECENT, EnginesFailed, Episode, Limits, Piece
from megarl.rollout.environments.load import Bound
from megarl.rollout.environments.play import Client, play
from megarl.rollout.environments.protocol import NoRoom, Task
from megarl.rollout.protocol import Completion

USER = [{"role": "user", "content": "what is 1+2?"}]


def bound(code: Any, plain: bool = False, **config: Any) -> Bound:
    return Bound(EnvironmentConfig(name="talk", source="x:y", **config), code, {}, plain)


async def played(family: str, seed: int, **speaker: Any) -> tuple[Episode, Speaker]:
    speaks = Speaker(family, np.random.default_rng(seed), **speaker)
    episode = Episode(chat_of(family), speaks, WIDE, seed, "e")
    await play(bound(lambda: Companion(seed)), episode, Task(PROMPT.text), Client("", "", "", episode))
    return episode, speaks


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_ids_trained_on_are_the_ids_sampled(family: str) -> None:
    """200 random conversations of six turns: calls laid out and tokenised at random, cut, broken, ended otherwise."""
    async def run() -> tuple[int, int, int]:
        calls = parts = errors = 0
        for seed in range(200):
            episode, speaker = await played(family, seed)
            parts += check_tokens(episode, speaker)
            calls, errors = calls + episode.tool_calls, errors + episode.tool_errors
        return parts, calls, errors

    parts, calls, errors = asyncio.run(run())
    assert calls > 500 and (errors > 50 or family in ("mistral", "deepseek"))
    if family == "qwen2.5":  # keeps everything that it has written
        assert parts == 200


def test_thoughts_split_where_the_user_speaks() -> None:
    async def run() -> list[int]:
        counts = []
        for seed in range(40):
            episode, speaker = await played("qwen3", seed, thinks=True)
            counts.append(check_tokens(episode, speaker))
            for turn, (prompt, _) in zip(episode.turns, speaker.asks, strict=True):
                if turn.piece and not turn.start:  # rendered anew: thoughts stand after the user's last words only
                    spoken = tokenizer_of("qwen3").decode(prompt).replace("<|im_start|>user\n<tool_response>", "")
                    assert "</think>" not in spoken[:spoken.rfind("<|im_start|>user")]
        return counts

    counts = asyncio.run(run())
    assert max(counts) > 1 and min(counts) >= 1


class Asked:
    """An episode that is asked by hand; the speaker says what it is told."""

    def __init__(self, replies: list[str] | None = None, limits: Limits = WIDE, family: str = "qwen2.5") -> None:
        self.speaker = Speaker(family, np.random.default_rng(0))
        if replies is not None:
            self.speaker.words = lambda: replies.pop(0)
            self.speaker.rng = type("Never", (), {"random": staticmethod(
                lambda size=None: 0.0 if size is None else np.zeros(size))})()
        self.episode = Episode(chat_of(family), self.speaker, limits, 9, "e")
        self.ask = self.episode.ask


def test_a_branch_is_a_sample_of_its_own() -> None:
    """Two calls go on from the same reply: the second has its tokens as context, and trains its own alone."""
    async def run() -> None:
        asked = Asked(["one", "two", "three"])
        first = await asked.ask(USER)
        begun = [*USER, first.message]
        await asked.ask([*begun, {"role": "user", "content": "left"}])
        await asked.ask([*begun, {"role": "user", "content": "right"}])
        assert check_tokens(asked.episode, asked.speaker) == 2
        left, right = asked.episode.samples(PROMPT, 3, str)
        said = first.completion.response_ids.tolist()
        assert left.response_ids[:len(said)].tolist() == said
        start = len(left.prompt.token_ids)
        assert right.prompt.token_ids[start:start + len(said)].tolist() == said  # as sampled, though it is context
        assert right.trained is None and (left.n, right.n, left.part, right.part) == (3, 3, 0, 1)

    asyncio.run(run())


def test_a_long_episode_does_not_keep_everything() -> None:
    """A branch from far back is rendered anew; the ends of all conversations stay known."""
    async def run() -> None:
        asked = Asked([f"reply {number}" for number in range(30)])
        first, other = await asked.ask(USER), await asked.ask([{"role": "user", "content": "another one"}])
        messages = [*USER]
        last = first
        for _ in range(20):
            messages += [last.message, {"role": "user", "content": "go"}]
            last = await asked.ask(messages)
        assert len(asked.episode._nodes) <= RECENT + 2
        await asked.ask([*USER, first.message, {"role": "user", "content": "back"}])
        await asked.ask([{"role": "user", "content": "another one"}, other.message, {"role": "user", "content": "go"}])
        assert check_tokens(asked.episode, asked.speaker) == 3

    asyncio.run(run())


def test_calls_at_the_same_time_do_not_share_a_sample() -> None:
    async def run() -> None:
        asked = Asked(["one", "two", "three", "four"])
        asked.speaker.delay_s = 0.01
        first = await asked.ask(USER)
        begun = [*USER, first.message]
        await asyncio.gather(*(asked.ask([*begun, {"role": "user", "content": word}]) for word in "abc"))
        assert check_tokens(asked.episode, asked.speaker) == 3

    asyncio.run(run())


def test_another_history_begins_anew() -> None:
    async def run() -> None:
        asked = Asked(["one", "two", "three"])
        first = await asked.ask(USER)
        await asked.ask([*USER, {**first.message, "content": "changed"}, {"role": "user", "content": "go"}])
        await asked.ask([{"role": "user", "content": "a summary"}])
        assert check_tokens(asked.episode, asked.speaker) == 3

    asyncio.run(run())


def test_messages_come_back_in_other_clothes() -> None:
    """As clients send them: content null or in parts, further keys, arguments laid out in another way."""
    async def run() -> None:
        asked = Asked(['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "three"])
        first = await asked.ask(USER, TOOLS)
        call = first.message["tool_calls"][0]
        echoed = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [
            {**call, "function": {**call["function"], "arguments": '{ "b": 2, "a": 1 }'}}]}
        user = {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "1+2?"}]}
        await asked.ask([user, echoed, {"role": "tool", "content": "3", "tool_call_id": call["id"]}], TOOLS)
        assert check_tokens(asked.episode, asked.speaker) == 1

    asyncio.run(run())


def test_other_tools_are_another_conversation() -> None:
    async def run() -> None:
        asked = Asked(["one", "two"])
        first = await asked.ask(USER, TOOLS)
        await asked.ask([*USER, first.message, {"role": "user", "content": "go"}])
        assert check_tokens(asked.episode, asked.speaker) == 2

    asyncio.run(run())


@pytest.mark.parametrize("total, response", [(45, 60), (60, 45)])
def test_limits_of_tokens(total: int, response: int) -> None:
    async def run() -> None:
        start = len(chat_of("qwen2.5").open(USER).ids)
        asked = Asked(["a" * 50, "b" * 50, "c" * 50], Limits(start + total, response, turn=20, turns=9))
        first = await asked.ask(USER)
        assert first.action.tokens == 20 and not asked.episode.ended
        messages = [*USER, first.message, {"role": "user", "content": "go"}]
        second = await asked.ask(messages)
        turn = asked.episode.turns[1]
        assert 0 < second.action.tokens < 20 and turn.end == 45  # what the observation has left
        with pytest.raises(NoRoom):
            await asked.ask([*messages, second.message, {"role": "user", "content": "go"}])
        assert asked.episode.cut
        assert [sample.finish for sample in asked.episode.samples(PROMPT, 0, str)] == ["length"]
        with pytest.raises(NoRoom):
            await asked.ask([{"role": "user", "content": "x" * 400}])
        asked = Asked(["one"], Limits(total=500, response=500, turn=500, turns=1))
        await asked.ask(USER)
        with pytest.raises(NoRoom, match="asked 1 times"):
            await asked.ask(USER)

    asyncio.run(run())


def test_seeds_are_a_function_of_episode_and_call() -> None:
    async def run() -> None:
        seeds = []
        asked = Asked(["one", "two"])
        inner = asked.episode._complete

        async def watch(ask: Any) -> Any:
            seeds.append(ask.seed)
            return await inner(ask)

        asked.episode._complete = watch
        await asked.ask(USER)
        await asked.ask(USER)
        assert seeds == [sample_seed(9, 0, 0), sample_seed(9, 1, 0)]

    asyncio.run(run())


def test_a_call_that_fails_leaves_the_conversation_as_it_was() -> None:
    async def run() -> None:
        asked = Asked(["one", "two"])
        first = await asked.ask(USER)
        inner, asked.episode._complete = asked.episode._complete, _none
        messages = [*USER, first.message, {"role": "user", "content": "go"}]
        with pytest.raises(EnginesFailed):
            await asked.ask(messages)
        asked.episode._complete = _fault
        with pytest.raises(MachineFault):
            await asked.ask(messages)
        assert isinstance(asked.episode.fault, MachineFault) and asked.episode.faulted.done()
        asked.episode._complete = inner
        await asked.ask(messages)
        assert check_tokens(asked.episode, asked.speaker) == 1

    asyncio.run(run())


def test_a_call_under_way_at_the_end_changes_nothing() -> None:
    async def run() -> None:
        asked = Asked(["one", "two"])
        await asked.ask(USER)
        asked.speaker.delay_s = 0.01
        late = asyncio.create_task(asked.ask([{"role": "user", "content": "another one"}]))
        await asyncio.sleep(0)
        asked.episode.ended = True
        samples = asked.episode.samples(PROMPT, 0, str)
        with pytest.raises(NoRoom, match="the episode has ended"):
            await late
        assert len(asked.speaker.asks) == 2 and len(asked.episode.turns) == len(samples) == 1
        assert asked.episode.prompt_tokens == len(asked.speaker.asks[0][0]) and not asked.episode.cut

    asyncio.run(run())


def test_experts_are_those_of_the_first_time() -> None:
    """A token that a later call computes anew keeps the experts it had when its successor was sampled."""
    piece, none = Piece(np.arange(3, dtype=np.int32)), np.zeros(0, np.int32)

    def reply(tokens: int, rows: int, mark: int) -> Completion:
        return Completion(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", [("a:1", 0, tokens)], 0,
                          np.full((rows, 2, 1), mark, np.uint8))

    assert piece.add(none, reply(2, 4, 7)) == (0, 2)
    assert piece.add(np.zeros(2, np.int32), reply(1, 7, 9)) == (4, 5)
    assert piece.experts[:, 0, 0].tolist() == [7, 7, 7, 7, 9, 9, 9]  # of 3 + 2 + 2 + 1 tokens but the last


async def _none(ask: Any) -> None:
    return None


async def _fault(ask: Any) -> None:
    raise MachineFault("no engine")
