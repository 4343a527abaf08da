"""Text where the protocol needs it: stop strings, text prompts, the decoded response. Reads tokenizer.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserMistake


class Text:
    """A tokenizer. Importing transformers would double the engine's start-up time, hence the bare library."""

    def __init__(self, tokenizer: Any, eos_token: str | None) -> None:
        self._tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.token_to_id(eos_token) if eos_token else None

    @classmethod
    def load(cls, path: str | Path) -> Text | None:
        """From `path`/tokenizer.json; None where there is none."""
        directory = Path(path)
        if not (directory / "tokenizer.json").exists():
            return None
        from tokenizers import Tokenizer

        settings = directory / "tokenizer_config.json"
        try:
            eos = json.loads(settings.read_text()).get("eos_token") if settings.exists() else None
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise UserMistake(f"the tokenizer cannot be read: {error}", str(directory),
                              "restore tokenizer.json and tokenizer_config.json") from error
        return cls(tokenizer, eos["content"] if isinstance(eos, dict) else eos)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds."""
        return self._tokenizer.encode(text).ids

    def response(self, ids: list[int], finish: dict[str, Any] | None, skip_special_tokens: bool) -> str:
        """The response as text, without the stop token or from the stop string on, as SGLang gives it."""
        matched = finish.get("matched") if finish and finish["type"] == "stop" else None
        text = self._tokenizer.decode(ids[:-1] if isinstance(matched, int) else ids,
                                      skip_special_tokens=skip_special_tokens)
        return text[:text.find(matched)] if isinstance(matched, str) and matched in text else text

    def find_stop(self, ids: np.ndarray, stops: tuple[str, ...]) -> str | None:
        """The first of `stops` that the newest of `ids` completed.

        Decodes only as many tokens as can hold the longest stop string (a token is at least a byte), and a few more
        because a cut may fall inside a character.
        """
        window = max(len(stop.encode()) for stop in stops) + 4
        text = self._tokenizer.decode(ids[-window:].tolist(), skip_special_tokens=False)
        return next((stop for stop in stops if stop in text), None)
