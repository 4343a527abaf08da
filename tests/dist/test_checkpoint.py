"""A checkpoint resumes exactly: weights, masters, moments, schedule, random state; the next update is the same."""

from __future__ import annotations

import datetime
from pathlib import Path

import models
import pytest
from worlds import run_world

from megarl.config.layout import Layout

CASES = [("qwen3", Layout(4, tensor=2, pipeline=2, sequence=True)),
         ("qwen3_moe", Layout(4, pipeline=2, expert=2)),
         ("qwen3_moe", Layout(4, tensor=2, sequence=True, expert=4))]


def _resume(rank: int, folder: str) -> list[str]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.checkpoint.hf_import import load_hf
    from megarl.checkpoint.state import Checkpoints, Progress
    from megarl.cluster.groups import make_groups
    from megarl.config.schema import OptimConfig
    from megarl.errors import UserMistake
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.update.optimizer import Optimizer, wrap

    def fresh(family: str, layout: Layout) -> Optimizer:
        path = f"{folder}/{family}"
        hf = HFConfig.read(path)
        chunks = build_chunks(hf, models.config_for(path), layout)
        load_hf(chunks, path, hf, layout)
        return Optimizer(wrap(chunks, True), OptimConfig(lr=1e-2, warmup_steps=4, weight_decay=0.1),
                         torch.float32)

    def update(optimizer: Optimizer, number: int) -> float:
        optimizer.zero_grad()
        for name, param in optimizer.chunks[0].named_parameters():
            seed = sum(map(ord, name)) + number  # equal on data-parallel ranks, which then agree with each other
            param.main_grad.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
        optimizer.finish_gradients()
        return optimizer.step()

    def weights(optimizer: Optimizer) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in optimizer.chunks[0].parameters()])

    wrong = []
    for number, (family, layout) in enumerate(CASES):
        make_groups(layout, datetime.timedelta(seconds=60), seed=1)
        first = fresh(family, layout)
        for step in range(3):
            update(first, step)
        place = Path(folder) / f"checkpoints{number}"
        store = Checkpoints(place, 2, first, {"model": family})
        for step in (1, 2, 3):
            store.save(Progress(step, 10 * step))
        drawn = torch.rand(3)
        norm, after, lr = update(first, 3), weights(first), first.lr

        second = fresh(family, layout)
        update(second, 7)  # a state of its own that must go
        torch.rand(5)
        again = Checkpoints(place, 2, second, {"model": family})
        progress = again.load(again.newest())
        if progress != Progress(3, 30) or len(list(place.iterdir())) != 2:
            wrong.append(f"{family} {layout}: {progress}, {sorted(p.name for p in place.iterdir())}")
        if not torch.equal(torch.rand(3), drawn):
            wrong.append(f"{family} {layout}: random numbers differ")
        if update(second, 3) != norm or not torch.equal(weights(second), after):
            wrong.append(f"{family} {layout}: the next update differs by {(weights(second) - after).abs().max()}")
        if second.updates != 4 or second.lr != lr or lr != 1e-2:
            wrong.append(f"{family} {layout}: update {second.updates} at rate {second.lr}, was {lr}")
        try:
            Checkpoints(place, 2, second, {"model": "another"}).load(again.newest())
            wrong.append("another model's checkpoint was taken")
        except UserMistake:
            pass
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return wrong


@pytest.mark.parametrize("ranks", [4])
def test_resume_is_exact(ranks: int, tmp_path: Path):
    for family in ("qwen3", "qwen3_moe"):
        models.save_hf_model(family, tmp_path / family)
    assert run_world(ranks, _resume, str(tmp_path)) == [[]] * ranks
