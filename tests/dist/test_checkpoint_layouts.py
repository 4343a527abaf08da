"""What one layout saved, every other one loads: masters and moments identical, and the next update is the same."""

from __future__ import annotations

import datetime
from pathlib import Path

import models
import pytest
from worlds import run_world

from megarl.config.layout import Layout

V = {"placement": "v", "chunks": 2}
MIRRORED = {"placement": "mirrored", "chunks": 2}
SAVED = {"qwen3": Layout(4, tensor=2, pipeline=2, sequence=True),
         "qwen3_moe": Layout(4, tensor=2, pipeline=2, sequence=True, expert=2)}
LOADED = {"qwen3": [Layout(4, pipeline=2), Layout(4, tensor=2, sequence=True), Layout(4), Layout(4, pipeline=2, **V)],
          "qwen3_moe": [Layout(4, pipeline=2), Layout(4, tensor=2, sequence=True, expert=2), Layout(4),
                        Layout(4, pipeline=2, expert=2, **V), Layout(4, expert=4),
                        Layout(4, pipeline=4, **MIRRORED)]}


def _move(rank: int, folder: str, family: str, distributed: bool) -> list[str]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.checkpoint.find import find
    from megarl.checkpoint.hf_export import iter_hf_tensors
    from megarl.checkpoint.hf_import import clear, load_hf
    from megarl.checkpoint.optimizer_state import pieces
    from megarl.checkpoint.state import Checkpoints, Progress
    from megarl.cluster.groups import make_groups
    from megarl.config.schema import OptimConfig
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.update.optimizer import Optimizer, wrap

    hf = HFConfig.read(f"{folder}/{family}")

    def fresh(layout: Layout, reads: bool = True) -> Optimizer:
        make_groups(layout, datetime.timedelta(seconds=60), seed=1)
        path = f"{folder}/{family}"
        chunks = build_chunks(hf, models.config_for(path), layout)
        load_hf(chunks, path, hf) if reads else clear(chunks)
        return Optimizer(wrap(chunks, distributed), OptimConfig(
            lr=1e-2, warmup_steps=2, weight_decay=0.1, clip=0.0, distributed=distributed), torch.float32,
            ends_together=layout.placement != "looped")

    def update(optimizer: Optimizer) -> None:
        """Gradients that depend on each weight's value alone: on any layout the same."""
        optimizer.zero_grad()
        for piece in pieces(optimizer.inner):
            parameter, ranks = piece.parameter, dist.get_world_size(piece.group)
            parameter.main_grad.copy_((parameter.detach() * 7).sin() / ranks)
        for chunk in optimizer.chunks:
            chunk.finish_grad_sync()  # adds them up over the ranks that share them, and nothing else
        optimizer.step()

    def held(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Master and both moments by Hugging Face name: each in turn takes the place of the weights."""
        found, chunks = {}, [chunk.module for chunk in optimizer.chunks]
        for row, kind in enumerate(("master", "first", "second")):
            kept = []
            for piece in pieces(optimizer.inner):
                whole = piece.whole()
                whole = torch.empty(3, piece.parameter.numel()) if whole is None else whole
                dist.broadcast(whole, dist.get_global_rank(piece.group, piece.owner), group=piece.group)
                kept.append((piece.parameter, piece.parameter.detach().clone()))
                piece.parameter.data.copy_(whole[row].view(piece.parameter.shape))
            found |= {f"{kind} {name}": tensor.clone() for name, tensor in iter_hf_tensors(chunks, hf)
                      if tensor is not None}
            for parameter, value in kept:
                parameter.data.copy_(value)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        return {name: tensor for part in everyone for name, tensor in part.items()}

    wrong = []
    place = Path(folder) / f"{family}-{distributed}"
    first = fresh(SAVED[family])
    for _ in range(3):
        update(first)
    store = Checkpoints(place, 2, first, {"model": family})
    store.save(Progress(3, 30, unfinished=(4, 9), held=(1, 2)))
    now = held(first)  # while the files are written
    store.finish()
    update(first)
    then = held(first)
    parallel_state.destroy_model_parallel()
    if len([name for name in now if name.startswith("second")]) * 3 != len(now) or len(now) < 60:
        wrong.append(f"{len(now)} tensors compared")
    if any(torch.equal(now[name], then[name]) for name in now):
        wrong.append("an update changed nothing")
    for layout in LOADED[family]:
        again = fresh(layout, reads=False)
        store = Checkpoints(place, 2, again, {"model": family})
        path = find(place).path
        progress = store.load(path, verify=False)
        if path != place / "step_00000003" or progress != Progress(3, 30, (4, 9), (1, 2)) or again.updates != 3:
            wrong.append(f"{layout}: {path} {progress} {again.updates}")
        for what, expected in (("saved", now), ("next", then)):
            got = held(again)
            off = {name: float((got[name] - expected[name]).abs().max()) for name in expected
                   if not torch.equal(got[name], expected[name])}
            if got.keys() != expected.keys() or off:
                wrong.append(f"{layout} {what}: {len(off)} differ, {dict(list(off.items())[:3])}")
            update(again)
        parallel_state.destroy_model_parallel()
    return wrong


@pytest.mark.parametrize("family, distributed", [("qwen3", True), ("qwen3_moe", True), ("qwen3_moe", False)])
def test_any_layout_loads_what_another_saved(family: str, distributed: bool, tmp_path: Path):
    models.save_hf_model(family, tmp_path / family)
    assert run_world(4, _move, str(tmp_path), family, distributed) == [[]] * 4
