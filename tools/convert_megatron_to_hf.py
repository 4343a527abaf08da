"""Make a Hugging Face checkpoint of a Megatron-core one: of a run, from any layout, or a converted one.

    python tools/convert_megatron_to_hf.py --checkpoint runs/mine --out exports/mine --verify      # the newest step
    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py --checkpoint runs/mine/checkpoints/step_00000040 \\
        --out exports/step40 --dtype bfloat16 --like models/qwen3

Config, tokenizer, chat template and the dtypes are those of --like, by default of the model that the run began with.
One tensor at a time is in memory (of each process). --verify compares logits with transformers in fp32; that needs
memory for the whole model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.checkpoint import convert
from megarl.checkpoint.inspect import newest
from megarl.checkpoint.team import Team
from megarl.errors import run_main


def main(argv: list[str]) -> None:
    """Convert, perhaps verify, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or the directory of a run")
    parser.add_argument("--out", type=Path, required=True, help="directory to be made")
    parser.add_argument("--like", type=Path, help="Hugging Face directory that config and tokenizer are taken from")
    parser.add_argument("--dtype", choices=convert.DTYPES, help="of the weights; default: as in --like")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="most that a file holds; default 5")
    parser.add_argument("--verify", action="store_true", help="compare logits with transformers")
    arguments = parser.parse_args(argv)
    with Team.from_environment() as team:
        source = team.each(lambda: newest(arguments.checkpoint))
        done = convert.to_hf(source, arguments.out, team, arguments.like, convert.DTYPES.get(arguments.dtype),
                             int(arguments.shard_gb * 1e9))
    if team.rank == 0:
        print(f"{source} -> {arguments.out}: {done.describe()}")
        if arguments.verify:
            from megarl.checkpoint import verify

            print(verify.verified(arguments.out, source, "hugging_face"))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
