"""From a row's prompt (text or chat messages) to token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.config.schema import DataConfig
from megarl.errors import UserMistake


class Encoder:
    """Applies the tokenizer and, where the config says so, its chat template.

    Text is tokenised with the special tokens that the tokenizer puts around a text. Messages (and, with chat_template
    "always", text as one user message) go through the template, which writes its own special tokens, up to the place
    where the assistant begins to speak.

    Args:
        tokenizer: a transformers tokenizer.
        config: its chat_template and chat_template_options are used.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def encode(self, content: Any, where: str) -> np.ndarray:
        """Token ids, int32.

        Args:
            content: text, or a list of {"role": text, "content": text}.
            where: file and line, for messages.
        Raises:
            UserMistake: content of another type, an empty prompt, half of a character, a template that is missing or
                refuses the messages.
        """
        mode = self._config.chat_template
        if isinstance(content, str) and mode != "always":
            ids = self._ids(content, where, special=True)
        else:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            _check_messages(messages, where)
            if mode == "never":
                raise UserMistake("the prompt is chat messages, but data.chat_template is never", where,
                                  "set it to auto, or give text")
            ids = self._ids(self._rendered(messages, where), where, special=False)
        if not ids:
            raise UserMistake("the prompt has no tokens", where, "remove the row")
        return np.array(ids, np.int32)

    def _ids(self, text: str, where: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserMistake(f"the prompt has half of a character: {text[error.start:error.start + 1]!a}", where,
                              "correct or remove the row (JSON writes some characters as two halves)") from error
        return self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def _rendered(self, messages: list[dict[str, str]], where: str) -> str:
        import jinja2  # what transformers renders templates with

        if not self._tokenizer.chat_template:
            raise UserMistake(f"the tokenizer of {self._tokenizer.name_or_path} has no chat template", where,
                              "use a checkpoint with one, or prompts as text and data.chat_template: auto or never")
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                       **self._config.chat_template_options)
        except jinja2.TemplateError as error:
            raise UserMistake(f"the chat template refuses the messages: {error}", where,
                              "write the roles in the order that the model's template takes") from error


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserMistake(f"the prompt is {messages!r:.80}, neither text nor chat messages", where,
                          'give a string, or a list like [{"role": "user", "content": "..."}]')
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)):
            raise UserMistake(f"{message!r:.80} is not a chat message", where,
                              'write {"role": "user", "content": "..."}, both as text')
