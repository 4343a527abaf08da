"""A model that speaks in random conversations, and an environment that answers it: for tests of episodes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from chat_templates import STOPS, TOOLS, tokenizer_of

from megarl.data.sample import Prompt
from megarl.rollout.environments.episode import Ask, Episode, Limits
from megarl.rollout.environments.protocol import Action, Task
from megarl.rollout.protocol import Completion

WIDE = Limits(total=100_000, response=100_000, turn=10_000, turns=1000)
PROMPT = Prompt(5, 0, 5, "talk", np.array([1], np.int32), text="what is 1+2?")


def call_text(family: str, arguments: dict[str, Any], rng: np.random.Generator) -> str:
    """A call of `add` as the family writes it, laid out at random."""
    layout = {"separators": [(",", ":"), (", ", ": "), (" , ", " :  ")][int(rng.integers(3))]}
    text = json.dumps(arguments, **layout)
    if family == "llama3":
        return f'{{"name": "add", "parameters": {text}}}'
    if family == "mistral":
        return f'[TOOL_CALLS] [{{"name": "add", "arguments": {text}}}]'
    if family == "deepseek":
        return ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n" + text +
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    if family == "glm":
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
                        for key, value in arguments.items())
        return f"<tool_call>add\n{pairs}</tool_call>"
    return f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>'


def random_ids(family: str, text: str, rng: np.random.Generator) -> list[int]:
    """The text in tokens of a tokenisation that the tokenizer itself would not choose; special tokens stay whole."""
    tokenizer = tokenizer_of(family)
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        piece = tokenizer.convert_ids_to_tokens(token)
        if token in tokenizer.added_tokens_decoder or len(piece) < 2 or rng.random() < 0.5:
            ids.append(token)
        else:
            ids += [tokenizer.convert_tokens_to_ids(letter) for letter in piece]
    return ids


@dataclass
class Speaker:
    """Stands for the engines: answers at random, and remembers everything.

    Attributes:
        asks: every prompt and what was sampled for it.
    """

    family: str
    rng: np.random.Generator
    thinks: bool = False
    delay_s: float = 0.0
    asks: list[tuple[list[int], Completion]] = field(default_factory=list)

    def words(self) -> str:
        """A reply without its end."""
        rng, text = self.rng, ""
        if self.thinks:
            text = f"<think>\n{'hm ' * int(rng.integers(1, 4))}\n</think>\n\n"
        elif self.family == "glm":
            text = "\n<think></think>\n"
        kind = rng.random()
        numbers = {"a": int(rng.integers(100)), "b": int(rng.integers(100))}
        if kind < 0.5:
            lead = "" if self.family in ("llama3", "mistral") else ["", "I add. "][int(rng.integers(2))]
            return text + lead + call_text(self.family, numbers, rng)
        if kind < 0.65:  # a call that is cut off in the middle
            whole = call_text(self.family, numbers, rng)
            return text + whole[:len(whole) // 2] if self.family not in ("mistral", "deepseek") else text + "{"
        return text + ["it is 3", "  so: é ☃ 12", "well\n\n", "the sum"][int(rng.integers(4))]

    async def __call__(self, ask: Ask) -> Completion:
        await asyncio.sleep(self.delay_s)
        ids = random_ids(self.family, self.words(), self.rng)
        stops = tokenizer_of(self.family).convert_tokens_to_ids(STOPS[self.family])
        finish = "stop"
        if self.rng.random() < 0.85:
            ids.append(stops[0] if self.rng.random() < 0.85 else stops[-1])
        else:
            finish = "length"
        ids = ids[:ask.max_tokens]
        half = len(ids) // 2
        done = Completion(np.array(ids, np.int32), -self.rng.random(len(ids)).astype(np.float32) - 1e-3, finish,
                          [("life:1", 0, half), ("life:2", half, len(ids))], 0)
        self.asks.append((ask.ids.tolist(), done))
        return done


class Companion:
    """An environment that answers calls with sums, and words with words; ends after some turns."""

    tools = TOOLS

    def __init__(self, seed: int, turns: int = 6) -> None:
        self._rng, self._left = np.random.default_rng(seed), turns

    async def reset(self, task: Task) -> str:
        return task.text

    async def step(self, action: Action) -> tuple[Any, float, bool]:
        self._left -= 1
        if action.calls:
            told = [{"role": "tool", "content": str(sum(value for value in call.arguments.values()))}
                    for call in action.calls]
        elif action.errors:
            told = f"that was no call: {len(action.errors)}"
        else:
            told = ["go on", "and 7+8?", [{"role": "user", "content": "éh?"}]][int(self._rng.integers(3))]
        return told, 0.25 * len(action.calls), self._left == 0


def check_tokens(episode: Episode, speaker: Speaker) -> int:
    """What is trained on is what was sampled, in order and once; every prompt is the beginning of its sample.

    Returns:
        The number of samples.
    """
    samples = episode.samples(PROMPT, 0, lambda ids: "")
    whole = [[*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()] for sample in samples]
    assert len(episode.turns) == len(speaker.asks)
    for turn, (asked, done) in zip(episode.turns, speaker.asks, strict=True):
        sample = samples[turn.piece]
        before = len(sample.prompt.token_ids) + turn.start
        assert whole[turn.piece][:before] == asked
        assert sample.response_ids[turn.start:turn.end].tolist() == done.response_ids.tolist()
        assert sample.logprobs[turn.start:turn.end].tolist() == done.logprobs.tolist()
        made = sample.token_versions()[turn.start:turn.end]
        half = len(made) // 2
        assert made.tolist() == [1] * half + [2] * (len(made) - half)
    for number, sample in enumerate(samples):
        trained = np.ones(len(sample.response_ids), bool) if sample.trained is None else sample.trained
        expected = np.zeros(len(trained), bool)
        for turn in episode.turns:
            if turn.piece == number:
                expected[turn.start:turn.end] = True
        assert trained.tolist() == expected.tolist() and trained[-1]
        assert (sample.logprobs[~trained] == 0).all() and (sample.token_versions()[~trained] == -1).all()
        assert sample.part == number
    return len(samples)
