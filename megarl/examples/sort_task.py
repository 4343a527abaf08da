"""The task of the quickstart: `sort 3 1 2 =` is to be answered with `1 2 3`.

Prompts, labels, the held-out split, the tokenizer and the files. It needs the prompt to be read: no fixed answer earns
anything. torch is not needed here; `warm_start` makes the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MIN_DIGITS, MAX_DIGITS = 3, 5
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = [PAD, BOS, EOS, UNK, "sort", "=", *"0123456789", *"abcdefghijklmnopqrstuvwxyz",
              *"ABCDEFGHIJKLMNOPQRSTUV"]  # 64 words; the letters are never used
PAD_ID, BOS_ID, EOS_ID, SORT_ID, EQUALS_ID, ZERO_ID = 0, 1, 2, 4, 5, 6
MAX_RESPONSE_TOKENS = MAX_DIGITS + 1


def is_held_out(digits: str) -> bool:
    """Whether this digit string ("312") belongs to the tenth that no training of any kind sees."""
    return hashlib.sha256(digits.encode()).digest()[0] % 10 == 0


def draw(rng: np.random.Generator, *, held_out: bool) -> Iterator[str]:
    """Endless digit strings of one side of the split; lengths are drawn evenly, strings may repeat."""
    while True:
        length = int(rng.integers(MIN_DIGITS, MAX_DIGITS + 1))
        digits = "".join(map(str, rng.integers(0, 10, length)))
        if is_held_out(digits) == held_out:
            yield digits


def row(digits: str) -> dict[str, str]:
    """The line of a data file for "312": `{"prompt": "sort 3 1 2 =", "label": "1 2 3"}`."""
    return {"prompt": f"sort {' '.join(digits)} =", "label": " ".join(sorted(digits))}


def prompt_ids(digits: str) -> list[int]:
    """What the tokenizer makes of the prompt of "312", `<bos>` included."""
    return [BOS_ID, SORT_ID, *(ZERO_ID + int(digit) for digit in digits), EQUALS_ID]


def answer_ids(digits: str) -> list[int]:
    """The tokens of an answer that consists of these digits in this order, `<eos>` included."""
    return [*(ZERO_ID + int(digit) for digit in digits), EOS_ID]


def write_prompts(path: Path, count: int, seed: int, *, held_out: bool) -> None:
    """Write `count` distinct prompts of one side of the split as JSONL."""
    distinct: dict[str, None] = {}
    for digits in draw(np.random.default_rng([seed, held_out]), held_out=held_out):
        distinct[digits] = None
        if len(distinct) == count:
            break
    path.write_text("".join(json.dumps(row(digits)) + "\n" for digits in distinct))


def read_prompts(path: Path) -> list[str]:
    """The digit strings of a file that `write_prompts` wrote."""
    return ["".join(filter(str.isdigit, json.loads(line)["prompt"])) for line in path.read_text().splitlines()]


def write_tokenizer(folder: Path) -> None:
    """Write a word-level Hugging Face tokenizer of 64 words that puts `<bos>` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK,
                            clean_up_tokenization_spaces=False).save_pretrained(folder)
