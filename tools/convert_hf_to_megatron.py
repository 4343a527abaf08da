"""Make a Megatron-core checkpoint of a Hugging Face one.

    python tools/convert_hf_to_megatron.py --hf models/qwen3 --out models/qwen3-megatron --verify
    torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py --hf models/big --out models/big-megatron

A run starts from it with model.path: models/qwen3 and model.weights: models/qwen3-megatron, in any layout. One tensor
at a time is in memory (of each process). Several nodes need a file system that all of them see. --verify compares
logits with transformers in fp32; that needs memory for the whole model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.checkpoint import convert
from megarl.checkpoint.team import Team
from megarl.errors import run_main


def main(argv: list[str]) -> None:
    """Convert, perhaps verify, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="directory with config.json and *.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="directory to be made")
    parser.add_argument("--dtype", choices=convert.DTYPES, help="of the weights; default: each as it is")
    parser.add_argument("--verify", action="store_true", help="compare logits with transformers")
    arguments = parser.parse_args(argv)
    with Team.from_environment() as team:
        done = convert.to_megatron(arguments.hf, arguments.out, team, dtype := convert.DTYPES.get(arguments.dtype))
    if team.rank == 0:
        print(f"{arguments.out}: {done.describe()}")
        if arguments.verify:
            from megarl.checkpoint import verify

            print(verify.verified(arguments.hf, arguments.out, "megatron", dtype))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
