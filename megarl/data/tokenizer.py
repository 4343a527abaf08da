"""The tokenizer of a checkpoint directory, through transformers, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import UserMistake

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in directory `path`. Truncation and padding that its files may ask for are switched off.

    Code of the checkpoint's own is not run.

    Raises:
        UserMistake: no such directory, or transformers finds no tokenizer in it.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserMistake(f"{path} is no directory", "model.path", "give the directory of a Hugging Face checkpoint")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserMistake(f"{path} has no tokenizer that transformers can load: {str(error).splitlines()[0]}",
                          "model.path", "put tokenizer.json and tokenizer_config.json there") from error
    if tokenizer.is_fast:  # now, since the first call that finds them on would change what other threads are using
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a response, ascending: eos of generation_config.json, config.json and the tokenizer.

    Chat models often end a turn with another token than a document; generation_config.json lists both.
    """
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            value: Any = _read_json(file).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    return sorted(token for token in found if token is not None)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text: special tokens left out, spaces as they are."""
    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserMistake(f"{file} is not JSON: {error}", "model.path", "download it again") from error
    if not isinstance(content, dict):
        raise UserMistake(f"{file} is not a JSON object", "model.path", "download it again")
    return content
