"""Ask an exported model a few prompts through transformers, greedily, and show its answers beside the labels.

    python tools/ask.py --model runs/quickstart/export --prompts runs/sort-task/heldout.jsonl --count 5
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path


def main() -> None:
    """Load the checkpoint and print one line per prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt and label")
    parser.add_argument("--count", type=int, default=5, help="how many, from the start of the file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval()
    with arguments.prompts.open() as lines:
        for row in map(json.loads, islice(lines, arguments.count)):
            prompt = row["prompt"]
            if isinstance(prompt, str):
                inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            else:
                inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt",
                                                       return_dict=True)
            with torch.inference_mode():
                output = model.generate(**inputs, do_sample=False, max_new_tokens=arguments.max_new_tokens,
                                        pad_token_id=tokenizer.pad_token_id)
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
            print(f"{prompt if isinstance(prompt, str) else prompt[-1]['content']}  ->  {answer.strip()}"
                  f"  (label: {row.get('label')})")


if __name__ == "__main__":
    main()
