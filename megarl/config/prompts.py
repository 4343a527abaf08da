"""What the first rows of a file of prompts tell of a run that would refuse them all, without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Config, EvalSetConfig, SourceConfig
from megarl.errors import UserMistake

if TYPE_CHECKING:
    from megarl.data.rows import Rows

_ROWS = 1000  # more are left to the run
_SPECIAL = 8  # tokens that a tokenizer may put around a text, at most


def check(config: Config, entry: SourceConfig | EvalSetConfig, rows: Rows) -> Iterator[UserMistake]:
    """The mistakes in `entry`, whose file has these rows: no template for its messages, no prompt short enough.

    Only what the run is sure to refuse is told: the first row decides whether a template is needed, and a text is too
    long only if it is so without special tokens. Messages are not measured.
    """
    first, mode = rows[0][entry.prompt], config.data.chat_template
    if isinstance(first, list) and mode == "never":
        yield UserMistake("the prompt is chat messages, but data.chat_template is never", rows.where(0),
                          "set it to auto, or give text")
    elif (isinstance(first, list) or (isinstance(first, str) and mode == "always")) and not _has_template(config):
        yield UserMistake(f"the tokenizer of {config.model.path} has no chat template", rows.where(0),
                          "use a checkpoint with one, or prompts as text and data.chat_template: auto or never")
    elif isinstance(entry, SourceConfig) and _all_too_long(config, entry, rows):
        yield UserMistake(f"all {len(rows)} prompts are longer than data.max_prompt_tokens "
                          f"({config.data.max_prompt_tokens})", entry.path, "raise it")


def _has_template(config: Config) -> bool:
    """Whether transformers would find one, in any of the places where it looks; also if that cannot be told."""
    model = Path(config.model.path)
    if any((model / name).exists() for name in ("chat_template.jinja", "chat_template.json",
                                                "additional_chat_templates")):
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except FileNotFoundError:
        return not model.is_dir()  # which is told elsewhere
    except (OSError, ValueError, AttributeError):
        return True


def _all_too_long(config: Config, entry: SourceConfig, rows: Rows) -> bool:
    """Whether every row is a text of too many tokens; ends at the first that is not, mostly without a tokenizer."""
    limit, tokenizer = config.data.max_prompt_tokens, None
    if config.data.on_long_prompt != "drop" or len(rows) > _ROWS:
        return False
    for number in range(len(rows)):
        text = rows[number][entry.prompt]
        try:
            if not isinstance(text, str) or len(text.encode()) + _SPECIAL <= limit:  # a token has a byte or more
                return False
        except UnicodeEncodeError:  # half of a character: told by the run, if it comes to this row
            return False
        tokenizer = tokenizer or _tokenizer(config.model.path)
        if tokenizer is None or len(tokenizer.encode(text, add_special_tokens=False).ids) <= limit:
            return False
    return True


def _tokenizer(path: str) -> Any:
    """Of tokenizer.json; None where there is none that can be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    except Exception:  # the library raises nothing more special
        return None
    tokenizer.no_truncation()
    return tokenizer
