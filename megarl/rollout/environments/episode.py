"""One episode: everything that the model is asked in it, as token ids, glued into as few samples as the tokens allow.

Each call gives the whole conversation so far as messages. Where they begin with a conversation that was answered
before, its ids and the sampled ids are kept and only the new messages are rendered (`chat.Chat.extend`); the call
then goes on in the same *piece*. Where they do not, where the template changes what stands before, or where another
call went on from there already, a new piece begins. Its prompt may repeat what earlier pieces sampled: as context, so
every sampled token is trained on exactly once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.data.sample import Prompt, Sample, sample_seed
from megarl.errors import MegarlError
from megarl.rollout.environments.chat import Chat, Message, Refused, Rendered, Said
from megarl.rollout.environments.protocol import Action, NoRoom
from megarl.rollout.protocol import Completion

RECENT = 8  # conversations that were gone on from already and are kept: a branch from further back begins anew


@dataclass(frozen=True)
class Ask:
    """One call to the engines.

    Attributes:
        ids: int32 [tokens], the prompt.
        seed: of the sampling.
        max_tokens: to sample at most.
        stop: stop strings beside the config's.
        name: for the request's id and messages.
    """

    ids: np.ndarray
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    name: str


Complete = Callable[[Ask], Awaitable[Completion | None]]


class EnginesFailed(Exception):
    """No engine gave a completion, after all retries."""


@dataclass(frozen=True)
class Limits:
    """What an episode may take.

    Attributes:
        total: tokens of a piece, prompt and response together.
        response: tokens of a piece's response, observations included.
        turn: tokens sampled in one turn.
        turns: calls to the model.
    """

    total: int
    response: int
    turn: int
    turns: int


@dataclass
class Piece:
    """A sequence that grows at its end.

    Attributes:
        prompt_ids: int32 [tokens], what the first call was asked.
        parts: what came since: (ids, log-probs or None for context, version spans of the part).
        experts: of the tokens so far but the last, as `Completion.experts`; None where they are not recorded.
    """

    prompt_ids: np.ndarray
    parts: list[tuple[np.ndarray, np.ndarray | None, list[tuple[str, int, int]]]] = field(default_factory=list)
    experts: np.ndarray | None = None

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(len(ids) for ids, _, _ in self.parts)

    def add(self, context: np.ndarray, completion: Completion) -> tuple[int, int]:
        """Go on with an observation, which may be empty, and a reply; where the reply's tokens are in the response.

        Of experts the first record of a token counts: where it was routed when the next one was sampled. A later call
        may have computed it anew.
        """
        if len(context):
            self.parts.append((context, None, []))
        start = self.response_tokens
        self.parts.append((completion.response_ids, completion.logprobs, completion.versions))
        if completion.experts is not None:
            known = 0 if self.experts is None else len(self.experts)
            new = completion.experts[known:]
            self.experts = new if self.experts is None else np.concatenate((self.experts, new))
        return start, self.response_tokens

    def response(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[str, int, int]]]:
        """Ids int32, log-probs float32, trained bool, all [tokens], and the version spans of the sampled ones."""
        spans, start = [], 0
        for ids, _, made in self.parts:
            spans += [(version, start + begin, start + end) for version, begin, end in made]
            start += len(ids)
        return (np.concatenate([ids for ids, _, _ in self.parts]).astype(np.int32),
                np.concatenate([np.zeros(len(ids), np.float32) if logprobs is None else logprobs
                                for ids, logprobs, _ in self.parts]),
                np.concatenate([np.full(len(ids), logprobs is not None) for ids, logprobs, _ in self.parts]), spans)


@dataclass
class Turn:
    """One reply of the model: tokens [start, end) of the response of a piece, and what it earned."""

    piece: int
    start: int
    end: int
    reward: float = 0.0


@dataclass(frozen=True)
class Reply:
    """An answered call.

    Attributes:
        message: what the model said, as an OpenAI message.
        action: the same, taken apart.
        completion: ids and log-probs as the engine gave them.
        prompt_tokens: of the call.
        turn: its place among the episode's tokens; the reward is set there.
    """

    message: Message
    action: Action
    completion: Completion
    prompt_tokens: int
    turn: Turn


@dataclass
class _Node:
    """A conversation that was answered: where another call may go on from.

    Attributes:
        heard: its messages, the reply included, reduced to what they say.
        prompt, said: what was asked and answered. (Other tools are another text, if the template shows them.)
        piece: whose end the reply is, as long as `free`.
        free: no call has gone on from here.
    """

    heard: list[str]
    prompt: Rendered
    said: Said
    piece: int
    free: bool = True


class Episode:
    """See the module.

    Args:
        chat: of the model.
        complete: asks the engines.
        limits: in tokens.
        seed: of the episode; call k samples with `sample_seed(seed, k, 0)`.
        name: of the episode, in request ids.

    Attributes:
        pieces, turns: so far.
        cut: a limit ended it, or cut its last reply.
        ended: no more calls are answered.
        fault: what the engines raised, for whoever lets the environment run: its code may have caught it. `faulted` is
            done once there is one.
        cached_tokens: prompt tokens that engines did not compute again, over all calls.
        prompt_tokens: of all calls.
        tool_calls, tool_errors: that could be read in the replies, and could not.
    """

    def __init__(self, chat: Chat, complete: Complete, limits: Limits, seed: int, name: str) -> None:
        self._chat, self._complete, self._limits = chat, complete, limits
        self._seed, self.name, self._calls = seed, name, 0
        self._nodes: list[_Node] = []
        self.pieces: list[Piece] = []
        self.turns: list[Turn] = []
        self.cut = self.ended = False
        self.fault: MegarlError | None = None
        self.faulted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.prompt_tokens = self.cached_tokens = self.tool_calls = self.tool_errors = 0

    async def ask(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, max_tokens: int | None = None,
                  stop: str | Sequence[str] = ()) -> Reply:
        """The model's reply to a conversation.

        Args:
            messages: the whole conversation, oldest first.
            tools: definitions that the model may call.
            max_tokens: to sample at most; what the limits leave if not given.
            stop: further stop strings; or one.
        Raises:
            NoRoom: the limits leave no token, or no further call; or the episode ended before the reply was there.
            Refused: messages, tools or stop strings are none, the chat template does not take them, or the run no
                stop strings.
            EnginesFailed: no engine answered.
            UserMistake, MachineFault: as the engines raise them; the run ends.
        """
        stop = _stops(stop)
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise Refused(f"max_tokens={max_tokens!r:.80} is no number of tokens")
        if self.ended:
            raise NoRoom("the episode has ended")
        if self._calls == self._limits.turns:
            self.cut = True
            raise NoRoom(f"the model was asked {self._calls} times, which is the limit")
        messages, tools = list(messages), list(tools)
        try:
            node, prompt, goes_on = self._prompt(messages, tools)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise Refused(f"messages or tools are of another form: {type(error).__name__}: {error}") from error
        piece = self.pieces[node.piece] if goes_on else Piece(prompt.ids)
        context = prompt.ids[len(piece.prompt_ids) + piece.response_tokens:]
        room = min(self._limits.total - len(prompt.ids), self._limits.turn, max_tokens or self._limits.turn,
                   self._limits.response - piece.response_tokens - len(context))
        if room < 1:
            self.cut = True
            raise NoRoom(f"a conversation of {len(prompt.ids)} tokens leaves no room for a reply")
        self._calls += 1
        ask = Ask(prompt.ids, sample_seed(self._seed, self._calls - 1, 0), room, stop,
                  f"{self.name}/{self._calls - 1}")
        if goes_on:
            node.free = False
        try:
            completion = await self._answered(ask)
        except BaseException:
            if goes_on:
                node.free = True
            raise
        self.cut = completion.finish == "length"
        self.prompt_tokens += len(prompt.ids)
        self.cached_tokens += completion.cached_tokens
        return self._record(messages, tools, prompt, completion, node.piece if goes_on else None, piece, context)

    async def _answered(self, ask: Ask) -> Completion:
        try:
            completion = await self._complete(ask)
        except MegarlError as error:
            self.fault = error
            if not self.faulted.done():
                self.faulted.set_result(None)
            raise
        if completion is None:
            raise EnginesFailed(f"no engine answered {ask.name}")
        if self.ended:  # its samples are made
            raise NoRoom("the episode has ended")
        return completion

    def _prompt(self, messages: list[Message], tools: list[Message]) -> tuple[_Node | None, Rendered, bool]:
        """(node gone on from, prompt, whether it goes on at the end of the node's piece)."""
        heard = [_heard(message) for message in messages]
        known = [node for node in self._nodes
                 if len(node.heard) < len(heard) and node.heard == heard[:len(node.heard)]]
        if not known:
            return None, self._chat.open(messages, tools), False
        node = max(known, key=lambda one: (len(one.heard), one.free))
        prompt, kept = self._chat.extend(node.prompt, node.said, messages[len(node.heard):], tools)
        return node, prompt, kept and node.free

    def _record(self, messages: list[Message], tools: list[Message], prompt: Rendered, completion: Completion,
                number: int | None, piece: Piece, context: np.ndarray) -> Reply:
        if number is None:
            number = len(self.pieces)
            self.pieces.append(piece)
        turn = Turn(number, *piece.add(context, completion))
        self.turns.append(turn)
        said = self._chat.read(completion.response_ids, tools, key=sample_seed(self._seed, self._calls, 1))
        heard = [_heard(message) for message in (*messages, said.message)]
        self._nodes.append(_Node(heard, prompt, said, number))
        self._nodes = [node for node in self._nodes[:-RECENT] if node.free] + self._nodes[-RECENT:]
        self.tool_calls += len(said.parsed.calls)
        self.tool_errors += len(said.parsed.errors)
        action = Action(said.text, said.parsed.content, said.parsed.calls, said.parsed.errors, completion.finish,
                        len(completion.response_ids))
        return Reply(said.message, action, completion, len(prompt.ids), turn)

    @property
    def last_content(self) -> str:
        """What the model said last, outside tool calls; "" if it was not asked."""
        return self._nodes[-1].said.parsed.content if self._nodes else ""

    @property
    def reward(self) -> float:
        """Of all turns."""
        return math.fsum(turn.reward for turn in self.turns)

    def samples(self, prompt: Prompt, n: int, decode: Callable[[list[int]], str]) -> list[Sample]:
        """One sample per piece; they share (position, n), and how the episode ended.

        A piece's prompt takes the place of the data's in `Sample.prompt`.
        """
        finish, found = "length" if self.cut else "stop", []
        for part, piece in enumerate(self.pieces):
            ids, logprobs, trained, versions = piece.response()
            found.append(Sample(replace(prompt, token_ids=piece.prompt_ids), n, self._seed, ids, logprobs, finish,
                                decode(ids.tolist()), versions, part=part, trained=None if trained.all() else trained,
                                experts=piece.experts))
        return found


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"stop={stop!r:.80} is no string that is not empty, and no list of such")  # engines would too
    return tuple(stops)


def _heard(message: Message) -> str:
    """What a message says, as text to compare: other keys that clients add or leave out do not count."""
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's content parts
        content = "".join(part.get("text", "") if part.get("type") == "text" else json.dumps(part, sort_keys=True)
                          for part in content)
    calls: list[Any] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                pass
        calls.append([function.get("name"), arguments])
    return json.dumps([message.get("role"), content or "", calls], sort_keys=True, ensure_ascii=False)
