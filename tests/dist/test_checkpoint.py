"""A checkpoint resumes exactly: weights, masters, moments, schedule, random state; the next update is the same."""

from __future__ import annotations

import datetime
import pickle
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
from worlds import run_world

from megarl.config.layout import Layout

CASES = [("qwen3", Layout(4, tensor=2, pipeline=2, sequence=True)),
         ("qwen3_moe", Layout(4, pipeline=2, expert=2)),
         ("qwen3_moe", Layout(4, tensor=2, sequence=True, expert=4)),
         ("qwen3", Layout(4, pipeline=2, placement="v", chunks=2)),
         ("qwen3_moe", Layout(4, pipeline=2, expert=2, placement="mirrored", chunks=2)),
         ("qwen3", Layout(4, pipeline=2, tensor=2, sequence=True, chunks=2))]
FUSED_CASES = [("qwen3_moe", Layout(2, expert=2))]


def _fused_adam() -> None:
    """Have Megatron-core take a stand-in for Transformer Engine's FusedAdam, with its bookkeeping.

    As in TE 2.11 (pytorch/optimizers/fused_adam.py): steps are counted in the parameter groups that are not empty, a
    state holds the two moments and nothing else, and `state_dict` knows no other name.
    """
    import torch
    from megatron.core import optimizer as core
    from megatron.core.optimizer import distrib_optimizer as distributed

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode):
            assert adam_w_mode
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

        def state_dict(self):
            found = super().state_dict()
            for state in found["state"].values():
                if unknown := state.keys() - {"exp_avg", "exp_avg_sq"}:
                    raise KeyError(unknown)
            return found

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                if not group["params"]:
                    continue
                group["step"] = group.get("step", 0) + 1
                (first, second), step = group["betas"], group["step"]
                for param in group["params"]:
                    state = self.state[param]
                    if not state:
                        state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                    state["exp_avg"].lerp_(param.grad, 1 - first)
                    state["exp_avg_sq"].lerp_(param.grad.square(), 1 - second)
                    root = (state["exp_avg_sq"] / (1 - second ** step)).sqrt() + group["eps"]
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(group["lr"] * (state["exp_avg"] / (1 - first ** step)) / root)

    core.Adam, core.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = FusedAdam, True, True


def newest(place: Path) -> Path:
    """Of the checkpoints of a run."""
    from megarl.checkpoint import files

    return files.whole(place)[-1]


def _resume(rank: int, folder: str, fused: bool, cases: list[tuple[str, Layout]]) -> list[str]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.checkpoint.find import find
    from megarl.checkpoint.hf_import import clear, load_hf
    from megarl.checkpoint.state import Checkpoints, Progress
    from megarl.cluster.groups import make_groups
    from megarl.config.schema import OptimConfig
    from megarl.errors import UserMistake
    from megarl.model.build import build_chunks
    from megarl.model.hf_config import HFConfig
    from megarl.update.optimizer import Optimizer, wrap

    def fresh(family: str, layout: Layout, reads: bool = True, **changed: float) -> Optimizer:
        path = f"{folder}/{family}"
        hf = HFConfig.read(path)
        chunks = build_chunks(hf, models.config_for(path), layout)
        load_hf(chunks, path, hf) if reads else clear(chunks)
        return Optimizer(wrap(chunks, True), OptimConfig(**{
            "lr": 1e-2, "warmup_steps": 4, "weight_decay": 0.1, **changed}), torch.float32,
            ends_together=layout.placement != "looped")

    def update(optimizer: Optimizer, number: int) -> float:
        optimizer.zero_grad()
        for chunk, name, param in ((c.module.part.stage, *pair) for c in optimizer.chunks for pair in
                                   c.named_parameters()):
            seed = 7 * chunk + sum(map(ord, name)) + number  # equal on data-parallel ranks, which then agree
            param.main_grad.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
        optimizer.finish_gradients()
        return optimizer.step()

    def weights(optimizer: Optimizer) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for chunk in optimizer.chunks for p in chunk.parameters()])

    wrong = []
    if fused:
        _fused_adam()
    for number, (family, layout) in enumerate(cases):
        make_groups(layout, datetime.timedelta(seconds=60), seed=1)
        first = fresh(family, layout)
        place = Path(folder) / f"checkpoints{number}{fused}"
        store = Checkpoints(place, 2, first, {"model": family})
        store.save(Progress(1, 10))  # before any update: there are no moments yet
        for step in range(3):
            update(first, step)
        for step in (2, 3):
            store.save(Progress(step, 10 * step))
        store.finish()
        drawn, saved = torch.rand(3), weights(first)
        norm, after, lr = update(first, 3), weights(first), first.lr

        second = fresh(family, layout)
        if layout.tensor > 1:
            update(second, 7)  # a state of its own that must go
        torch.rand(5)
        again = Checkpoints(place, 2, second, {"model": family})
        progress = again.load(newest(place))
        if progress != Progress(3, 30) or len(list(place.iterdir())) != 2:
            wrong.append(f"{family} {layout}: {progress}, {sorted(p.name for p in place.iterdir())}")
        if not torch.equal(torch.rand(3), drawn):
            wrong.append(f"{family} {layout}: random numbers differ")
        if update(second, 3) != norm or not torch.equal(weights(second), after):
            wrong.append(f"{family} {layout}: the next update differs by {(weights(second) - after).abs().max()}")
        if second.updates != 4 or second.lr != lr or lr != 1e-2:
            wrong.append(f"{family} {layout}: update {second.updates} at rate {second.lr}, was {lr}")
        # what the config says counts, not what was saved; the weights that the run began with are not asked for
        third = fresh(family, layout, reads=False, lr=2e-3, eps=1e-5)
        Checkpoints(place, 2, third, {"model": family}).load(newest(place))
        if not torch.equal(weights(third), saved):
            wrong.append(f"{family} {layout}: loaded weights differ by {(weights(third) - saved).abs().max()}")
        told = {(group["lr"], group["eps"]) for group in third.inner.param_groups}
        if third.updates != 3 or told != {(2e-3 * 3 / 4, 1e-5)}:
            wrong.append(f"{family} {layout}: resumed with (rate, eps) {told} at update {third.updates}")
        try:
            Checkpoints(place, 2, second, {"model": "another"}).load(newest(place))
            wrong.append("another model's checkpoint was taken")
        except UserMistake:
            pass
        dist.barrier()
        if rank == 0:  # a user's copy is no checkpoint of the run; a cut file is told
            shutil.copytree(newest(place), place / "step_best")
            next(newest(place).glob("*.distcp")).write_bytes(b"cut")
        dist.barrier()
        try:
            if newest(place).name != "step_00000003":
                wrong.append(f"newest is {newest(place)}")
            again.load(newest(place))
            wrong.append("a damaged checkpoint was taken")
        except UserMistake as error:
            if "damaged" not in str(error):
                wrong.append(str(error))
        found = find(place)  # the one before is taken, and the bad one named
        path, progress = found.path, again.load(found.path, verify=False)
        if path.name != "step_00000002" or progress != Progress(2, 20) or second.updates != 3 or [
                "step_00000003 is damaged" in told for told in found.passed_over] != [True]:
            wrong.append(f"resumed {path} {progress}, {found.passed_over}")
        if find(place) != type(found)(path):
            wrong.append("what was passed over is still in the way")
        wrong += _full_disk(again, Progress(4, 40), rank)
        wrong += _incomplete(again, newest(place), rank) + _all_damaged(place, rank)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return wrong


def _full_disk(store: Any, progress: Any, rank: int) -> list[str]:
    """Files of some ranks cannot grow: every rank is told, nothing is lost, and there can be another save."""
    import resource
    import signal

    from megarl.errors import MachineFault

    before, wrong = newest(store._directory), []
    files = {path.name: path.read_bytes() for path in before.iterdir()}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for full, late in (({1}, False), ({0}, False), ({0, 1}, False), ({0}, True)):  # late: what describes the whole
        limit = (10 if late else 1000, limits[1]) if rank in full else limits
        try:
            if not late:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            store.save(progress)
            if late:
                store._writing[2].wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            store.finish()
            wrong.append(f"a save without room on {full} succeeded")
        except MachineFault as fault:
            told = str(fault)
            if f"{progress.step:08d} could not be written: rank {min(full)}: " not in told or "remedy: " not in told:
                wrong.append(told)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if newest(store._directory) != before or files != {path.name: path.read_bytes() for path in before.iterdir()}:
            wrong.append(f"newest is {newest(store._directory)} after {full}")
    store.save(progress)
    if store.finish().name != f"step_{progress.step:08d}":
        wrong.append("the next save failed")
    return wrong


def _incomplete(store: Any, path: Path, rank: int) -> list[str]:
    """A checkpoint that lacks a tensor of the model is refused: nothing else would fill it."""
    import torch.distributed as dist

    from megarl.errors import UserMistake

    kept, wrong = (path / ".metadata").read_bytes(), []
    for key in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"):
        dist.barrier()
        if rank == 0:
            index = pickle.loads(kept)
            del index.state_dict_metadata[key]
            (path / ".metadata").write_bytes(pickle.dumps(index))
        dist.barrier()
        try:
            store.load(path, verify=False)
            wrong.append(f"a checkpoint without {key} was taken")
        except UserMistake as error:
            if key not in str(error):
                wrong.append(str(error))
    return wrong


def _all_damaged(place: Path, rank: int) -> list[str]:
    """No start begins anew while damaged checkpoints are there; neither does the second one."""
    import torch.distributed as dist

    from megarl.checkpoint import files
    from megarl.checkpoint.find import find
    from megarl.errors import UserMistake

    wrong = []
    for number in range(2):
        dist.barrier()
        for path in files.whole(place) if rank == 0 else ():
            (path / files.CHECKSUMS).write_text("{")
        dist.barrier()
        try:
            wrong.append(f"start {number} found {find(place)}")
        except UserMistake as error:
            if "no checkpoint can be used" not in str(error):
                wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("fused, cases", [(False, CASES), (True, FUSED_CASES)], ids=["torch", "fused"])
def test_resume_is_exact(fused: bool, cases: list[tuple[str, Layout]], tmp_path: Path):
    """With torch's AdamW, and with a stand-in for the fused one that a GPU has."""
    for family in {family for family, _ in cases}:
        models.save_hf_model(family, tmp_path / family)
    ranks = cases[0][1].world
    assert run_world(ranks, _resume, str(tmp_path), fused, cases) == [[]] * ranks
