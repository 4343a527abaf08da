"""How long a save stops a run: written in a thread against at once, in one run of each kind of step.

`python tests/bench/checkpoint_stall.py [--hidden 512 --layers 8]`: one trainer, a dense model, steps of forward and
backward; every step saves. The disk is the temporary directory's.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

    from megarl.cluster import device

    device.prepare("cpu", 0)
    import models
    import torch
    import torch.distributed as dist
    import transformers

    from megarl.checkpoint.hf_import import load_hf
    from megarl.checkpoint.state import Checkpoints, Progress
    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout
    from megarl.config.schema import OptimConfig
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.update.optimizer import Optimizer, wrap

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = transformers.Qwen3Config(
            vocab_size=8192, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
            max_position_embeddings=4096, tie_word_embeddings=False)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        make_groups(Layout(1), datetime.timedelta(seconds=60), seed=1)
        hf = HFConfig.read(str(folder / "model"))
        chunks = build_chunks(hf, models.config_for(str(folder / "model")), Layout(1))
        load_hf(chunks, str(folder / "model"), hf)
        optimizer = Optimizer(wrap(chunks, True), OptimConfig(), torch.float32)
        weights = sum(p.numel() for p in chunks[0].parameters())
        work = torch.randn(options.hidden, options.hidden)

        def compute() -> None:
            """About as long as a step's forward and backward of these tokens: 6 * weights * tokens operations."""
            data = torch.randn(options.tokens, options.hidden)
            for _ in range(3 * weights // options.hidden**2):
                data @ work

        seconds: dict[str, list[float]] = {"step": [], "at once": [], "in a thread": [], "step beside the thread": []}
        for step in range(options.steps):
            for kind in ("at once", "in a thread"):
                begun = time.perf_counter()
                compute()
                optimizer.zero_grad()
                optimizer.finish_gradients()
                optimizer.step()
                seconds["step"].append(time.perf_counter() - begun)
                store = Checkpoints(folder / kind, 1, optimizer, {"model": "bench"})
                begun = time.perf_counter()
                store.save(Progress(step))
                if kind == "at once":
                    store.finish()
                seconds[kind].append(time.perf_counter() - begun)
                if kind == "in a thread":
                    begun = time.perf_counter()
                    compute()
                    seconds["step beside the thread"].append(time.perf_counter() - begun)
                    store.finish()
        size = sum(path.stat().st_size for path in (folder / "at once").rglob("*") if path.is_file())
        middle = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        print(f"{weights / 1e6:.1f} million weights, {size / 1e6:.0f} MB a checkpoint")
        for name, value in middle.items():
            print(f"{name:24s} {value:7.3f} s   {value / middle['step']:6.1%} of a step")
        print(f"stall in a thread / at once: {middle['in a thread'] / middle['at once']:.3f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
