"""A conversation as token ids: what was sampled stays as it was sampled, and only what is new is rendered.

After a reply the next prompt is made of (1) the ids so far, (2) the ids that the engine sampled, (3) the ids of what
the chat template writes after the reply: the end of the assistant's turn, the new messages, the beginning of the next
turn. (3) is cut out of the rendered text of the whole conversation and tokenised by itself; it begins at a special
token in all the templates known here, so its ids do not depend on what stands before it.

The end of a turn is often both sampled and written by the template (Qwen: `<|im_end|>`, then a newline that no model
samples). A last sampled token that is a stop token and equals the first of (3) is not repeated. Any other is kept, and
the template's end follows it.

This holds only where the template keeps what it wrote before: the text of the conversation with the reply must begin
with the prompt's, say what the reply says, and be the beginning of the text with the new messages. Templates that
change the past (Qwen3 drops the thoughts of earlier turns when the user speaks) fail it; then the caller is told to
begin a new sequence with the re-rendered text, whose tokens are context and not trained on a second time.
Whitespace around messages, and how the arguments of a call are laid out, may differ: there the sampled form stays.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.errors import UserMistake
from megarl.rollout.environments.tools import FORMATS, Parsed, detect, plain

Message = dict[str, Any]
LONE = re.compile("[\ud800-\udfff]")  # halves of a character, as some tools' output has them: no tokenizer takes them
MARK = "megarl-mark-0f5c"  # stands for a reply where only what the template writes around it is wanted


class Refused(Exception):
    """The chat template does not take these messages, or the run not an option of a call."""


@dataclass(frozen=True)
class Rendered:
    """A prompt: the template's text up to where the assistant begins to speak, and its tokens.

    Attributes:
        messages: what it was rendered from; replies in the form in which the template took them.
        text: as the template writes it now.
        ids: int32 [tokens]; where replies lie in it, as they were sampled.
    """

    messages: tuple[Message, ...]
    text: str
    ids: np.ndarray


@dataclass(frozen=True)
class Said:
    """A reply as the tokenizer and the parser of tool calls read it.

    Attributes:
        ids: int32 [tokens], as sampled.
        text: without the stop token at its end; other special tokens are shown.
        parsed: taken apart.
    """

    ids: np.ndarray
    text: str
    parsed: Parsed

    @property
    def message(self) -> Message:
        """As an OpenAI message; the arguments of calls as JSON text."""
        message: Message = {"role": "assistant", "content": self.parsed.content}
        if self.parsed.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {
                    "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for call in self.parsed.calls]
        elif self.parsed.errors:
            message["content"] = self.text.strip()  # what cannot be read as a call is shown as it is
        return message


class Chat:
    """The chat template of a tokenizer, in both directions.

    Args:
        tokenizer: a transformers tokenizer.
        options: variables of the template (`data.chat_template_options`).
        stop_ids: tokens that end a reply.
        form: a name in `tools.FORMATS`; "auto": by the template.
    Raises:
        UserMistake: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, options: dict[str, Any] | None = None, stop_ids: Collection[int] = (),
                 form: str = "auto") -> None:
        if not tokenizer.chat_template:
            raise UserMistake(f"the tokenizer of {tokenizer.name_or_path} has no chat template, and environments talk "
                              "in messages", "model.path", "put a chat_template.jinja beside its tokenizer.json")
        self._tokenizer, self._options, self._stop_ids = tokenizer, options or {}, frozenset(stop_ids)
        template = tokenizer.chat_template
        template = template if isinstance(template, str) else "\n".join(template.values())
        self.form = detect(template) if form == "auto" else form
        self._structured = "tool_calls" in template

    def open(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """A prompt rendered from nothing.

        Raises:
            Refused: by the template.
        """
        text = self._render(messages, tools)
        return Rendered(tuple(messages), text, self._ids(text))

    def read(self, ids: np.ndarray, tools: Sequence[Message] = (), key: int = 0) -> Said:
        """A reply from the ids that were sampled; calls are looked for only if there are tools.

        Args:
            key: the ids of calls are a function of it and of their number: nine letters and digits, as Mistral's
                template demands.
        """
        kept = ids[:-1] if len(ids) and int(ids[-1]) in self._stop_ids else ids
        text = self._tokenizer.decode(kept.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parsed = self._parse(text, tools)
        calls = tuple(replace(call, id=hashlib.sha256(f"{key}/{number}".encode()).hexdigest()[:9])
                      for number, call in enumerate(parsed.calls))
        return Said(ids, text, replace(parsed, calls=calls))

    def extend(self, prompt: Rendered, said: Said, new: Sequence[Message], tools: Sequence[Message] = ()
               ) -> tuple[Rendered, bool]:
        """The prompt after `said` was answered to `prompt` and `new` messages came.

        Args:
            prompt: the conversation before the reply.
            said: the reply.
            new: what came after it, at least one message.
            tools: as when the prompt was rendered.
        Returns:
            (next prompt, True) whose ids begin with the prompt's and the reply's; or (next prompt, False) rendered
            from nothing, because the template changes what stands before.
        Raises:
            Refused: by the template.
        """
        fresh, refused = None, None
        for message in self._forms(said):
            try:
                before = self._render([*prompt.messages, message], tools, opening=False)
                messages = (*prompt.messages, message, *new)
                after = self._render(messages, tools)
                end = self._end(prompt.messages, tools)
            except Refused as error:  # this form of the reply; the other one may pass
                refused = error
                continue
            if after.startswith(before) and self._says(before, prompt.text, end, said, tools):
                added = self._ids(end + after[len(before):])
                if len(said.ids) and len(added) and added[0] == said.ids[-1] and int(added[0]) in self._stop_ids:
                    added = added[1:]
                return Rendered(messages, after, np.concatenate((prompt.ids, said.ids, added))), True
            fresh = fresh or (messages, after)
        if fresh is None:
            raise refused
        messages, text = fresh
        return Rendered(messages, text, self._ids(text)), False

    def _forms(self, said: Said) -> list[Message]:
        """Messages that may stand for the reply: with its calls as data, as templates of tool models want it, or as
        plain text."""
        raw = {"role": "assistant", "content": said.text}
        parsed = said.parsed
        if not (parsed.calls and self._structured) or parsed.errors:
            return [raw]
        return [said.message, raw]

    def _end(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """What the template writes after the assistant's words."""
        text = self._render([*messages, {"role": "assistant", "content": MARK}], tools, opening=False)
        return text.rpartition(MARK)[2]

    def _says(self, before: str, prompt: str, end: str, said: Said, tools: Sequence[Message]) -> bool:
        """Whether the conversation's text is the prompt's and then what the reply says, up to whitespace and layout."""
        if not (before.startswith(prompt) and before.endswith(end)):
            return False
        written = before[len(prompt):len(before) - len(end)]
        if _squeezed(written) == _squeezed(said.text):
            return True
        read = self._parse(written, tools)
        return not read.errors and not said.parsed.errors and read.calls == said.parsed.calls \
            and _squeezed(read.content) == _squeezed(said.parsed.content)

    def _parse(self, text: str, tools: Sequence[Message]) -> Parsed:
        return (FORMATS[self.form] if tools else plain)(text, tools)

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], opening: bool = True) -> str:
        import jinja2  # what transformers renders templates with

        try:
            text = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages], tools=list(tools) or None, tokenize=False,
                add_generation_prompt=opening, **self._options)
            return LONE.sub("\ufffd", text)
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(f"the chat template refuses the conversation: {error}") from error


def _for_template(message: Message) -> Message:
    """As templates expect a message: content as text, and the arguments of calls as objects, where OpenAI's protocol
    has null and JSON text."""
    message = {**message, "content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _squeezed(text: str) -> str:
    return "".join(text.split())
