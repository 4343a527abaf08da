"""Peak memory and speed of conversions, Hugging Face -> Megatron-core -> Hugging Face, against the largest tensor.

    python tests/bench/convert_memory.py [--mb 1000] [--vocab 64000] [--hidden 512] [--experts 64] [--folder DIR]

Makes a random Qwen3-MoE of about so many MB in bf16, in files of a tenth of it. Each conversion is a fresh process (one
thread); `peak` is how far its largest resident memory (VmHWM: pages of mapped files count too) went above what was
resident once the libraries were loaded. Beside it what a conversion needs that has the whole model in memory: load all
tensors with safetensors, save them again.

Asked for: at most 3 times the largest tensor, whatever the size of the model. The exit status is 1 if that is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def resident(key: str) -> int:
    """Bytes, of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def measure(way: str, source: Path, target: Path) -> dict[str, float]:
    """One conversion in this process."""
    import torch
    from safetensors.torch import load_file, save_file

    from megarl.checkpoint.convert import to_hf, to_megatron
    from megarl.checkpoint.team import Team

    torch.set_num_threads(1)
    before, started = resident("VmRSS"), time.perf_counter()
    if way == "whole":
        target.mkdir()
        save_file({name: tensor.clone() for file in source.glob("*.safetensors")
                   for name, tensor in load_file(file).items()}, target / "model.safetensors")
    else:
        {"in": to_megatron, "out": to_hf}[way](source, target, Team())
    return {"peak": resident("VmHWM") - before, "seconds": time.perf_counter() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("mb", 1000), ("vocab", 64000), ("hidden", 512), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="for the checkpoints; default: a temporary one")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, source, target = arguments.measure
        print(json.dumps(measure(way, Path(source), Path(target))))
        return 0
    import models
    import torch

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, ffn = Path(name), 384
        per_layer = 2 * 3 * arguments.experts * ffn * arguments.hidden
        layers = max(1, round(arguments.mb * 1e6 - 4 * arguments.vocab * arguments.hidden) // per_layer)
        models.save_hf_model("qwen3_moe", folder / "hf", dtype=torch.bfloat16, vocab_size=arguments.vocab,
                             hidden_size=arguments.hidden, num_hidden_layers=layers, num_experts=arguments.experts,
                             moe_intermediate_size=ffn, max_shard_size=f"{arguments.mb // 10}MB")
        model = sum(file.stat().st_size for file in (folder / "hf").glob("*.safetensors"))
        largest = 2 * arguments.vocab * arguments.hidden
        print(f"model {model / 1e6:.0f} MB, largest tensor {largest / 1e6:.1f} MB")
        print(f"{'':24}{'peak MB':>10}{'x largest':>12}{'x model':>10}{'MB/s':>8}")
        missed = False
        for way, source, target, told in (("in", "hf", "mg", "HF -> Megatron-core"), ("out", "mg", "back", "and back"),
                                          ("whole", "hf", "whole", "all in memory")):
            done = subprocess.run([sys.executable, __file__, "--measure", way, str(folder / source),
                                   str(folder / target)], check=True, stdout=subprocess.PIPE, text=True,
                                  env=os.environ | {"OMP_NUM_THREADS": "1"})
            found = json.loads(done.stdout)
            print(f"{told:24}{found['peak'] / 1e6:10.1f}{found['peak'] / largest:12.2f}{found['peak'] / model:10.3f}"
                  f"{model / 1e6 / found['seconds']:8.0f}", flush=True)
            missed |= way != "whole" and found["peak"] > 3 * largest
        return int(missed)


if __name__ == "__main__":
    sys.exit(main())
