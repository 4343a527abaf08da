"""The layout is not part of the maths: the same samples give the same loss, gradients and weights on every layout.

The single process is itself compared with transformers' autograd and an objective written out in plain loops. Adam's
eps is 1e-3 here: at 1e-8 the first updates are the signs of the gradients, and those of gradients near zero are noise.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from worlds import run_world

from megarl.config.layout import Layout
from megarl.config.schema import Config
from megarl.data.ragged import SampleBatch
from megarl.pipeline.generators import SCHEDULES, fitting

GROUPS, SAMPLES, STEPS = 9, 4, 3
BALANCE, Z, ENTROPY, KL = 0.02, 0.01, 0.01, 0.05


@dataclass(frozen=True)
class Padded(Layout):
    """A layout that pads every sequence to a multiple of 8 and every pack to one of 32 on top of what it needs."""

    @property
    def sequence_multiple(self) -> int:
        return 8

    @property
    def pack_multiple(self) -> int:
        return 32


@dataclass(frozen=True)
class Case:
    """A layout, the cap that cuts the samples into micro-batches, and the pipeline schedule."""

    layout: Layout
    max_tokens: int = 96
    schedule: str = "1f1b"


SMALL = 24  # a cap that gives as many micro-batches as the dual schedules need


def scheduled(name: str, world: int, pipeline: int, **degrees: Any) -> Case:
    """A case with enough micro-batches for the schedule."""
    family = SCHEDULES[name]
    return Case(Layout(world, pipeline=pipeline, placement=family.placement, chunks=family.chunks, **degrees),
                SMALL, name)


# by world size; experts are cut only where the model has them
CASES = {
    1: [Case(Layout(1)), Case(Layout(1), 1000), Case(Padded(1), 200), Case(Layout(1), SMALL)],
    2: [Case(Layout(2)), Case(Layout(2, tensor=2, sequence=True)), Case(Layout(2, pipeline=2)),
        Case(Layout(2, context=2)), Case(Layout(2, expert=2)), Case(Layout(2, expert=2), 300)],
    4: [Case(Layout(4, tensor=2, pipeline=2, sequence=True)), Case(Layout(4, pipeline=2, expert=2)),
        Case(Layout(4, tensor=2, expert=2, sequence=True)),
        scheduled("gpipe", 4, 4), scheduled("zb-h1", 4, 2, context=2), scheduled("interleaved", 4, 2, expert=2),
        scheduled("zb-v", 4, 2, tensor=2, sequence=True), scheduled("dualpipev", 4, 2, expert=2),
        scheduled("dualpipe", 4, 4), scheduled("dualpipe", 4, 2)],
    8: [Case(Layout(8, tensor=2, expert=4, sequence=True)),
        Case(Layout(8, tensor=2, pipeline=2, context=2, sequence=True)),
        scheduled("dualpipev", 8, 2, tensor=2, context=2, sequence=True),
        scheduled("dualpipe", 8, 2, tensor=2, expert=2, sequence=True)],
}
RUNS = [("qwen3", "grpo"), ("qwen3", "gspo"), ("qwen3_moe", "grpo"), ("qwen3_moe", "gspo")]


def config(path: str, algorithm: str, case: Case, distributed: bool) -> Config:
    """Every term of the objective on."""
    return Config.model_validate({
        "pipeline": {"schedule": case.schedule},
        "run": {"seed": 3}, "model": {"path": path, "dtype": "fp32", "head_chunk_tokens": 50,
                                      "balance": {"coefficient": BALANCE, "z_loss": Z}},
        "data": {"sources": [{"path": "none.jsonl"}]}, "reward": {"terms": [{"name": "exact"}]},
        "rollout": {"temperature": 0.8},
        "objective": {"algorithm": algorithm, "entropy_bonus": ENTROPY, "kl": {"coefficient": KL},
                      "correction": {"kind": "truncated", "high": 1.05}},
        "batch": {"minibatches": STEPS, "max_tokens": case.max_tokens},
        "optim": {"lr": 1e-3, "eps": 1e-3, "warmup_steps": 2, "weight_decay": 0.1, "distributed": distributed}})


def write_samples(folder: Path, family: str) -> None:
    """Random samples, with log-probs as a slightly wrong engine would give them."""
    rng = np.random.default_rng(11)
    count = GROUPS * SAMPLES
    prompt = np.repeat(rng.integers(1, 12, GROUPS), SAMPLES)
    response = rng.integers(1, 25, count)
    tokens = rng.integers(2, 99, int((prompt + response).sum()))
    torch.save(dict(position=np.repeat(np.arange(GROUPS), SAMPLES), n=np.tile(np.arange(SAMPLES), GROUPS),
                    prompt_lengths=prompt, response_lengths=response, tokens=tokens.astype(np.int32),
                    logprobs=np.zeros(int(response.sum()), np.float32),
                    rewards=rng.integers(0, 3, count).astype(np.float64), truncated=rng.random(count) < 0.1),
               folder / "samples.pt")
    samples, noise = read_samples(folder), np.random.default_rng(12)
    model = models.hf_model(family)
    with torch.no_grad():
        logprobs = torch.cat([_hf_logprobs(model, row, 0.8)[0] for row in _rows(samples)])
    state = torch.load(folder / "samples.pt", weights_only=False)
    state["logprobs"] = (logprobs.numpy() + noise.normal(0, 0.05, len(logprobs))).astype(np.float32)
    torch.save(state, folder / "samples.pt")


def read_samples(folder: Path | str) -> SampleBatch:
    return SampleBatch(**torch.load(Path(folder) / "samples.pt", weights_only=False))


def _rows(samples: SampleBatch) -> list[tuple[torch.Tensor, int]]:
    """(tokens, prompt length) of each sample."""
    ends = np.cumsum(samples.lengths)
    return [(torch.from_numpy(samples.tokens[e - n:e].astype(np.int64)), int(p))
            for e, n, p in zip(ends, samples.lengths, samples.prompt_lengths, strict=True)]


def _hf_logprobs(model: Any, row: tuple[torch.Tensor, int], temperature: float
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) of a sample's response tokens by transformers."""
    tokens, prompt = row
    logits = model(tokens[None]).logits[0, prompt - 1:-1] / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, tokens[prompt:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def train(rank: int, folder: str, cases: list[Case]) -> dict[str, Any]:
    """Run all layouts of a world; rank 0 gives the results by (case, family, algorithm)."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    results: dict[str, Any] = {}
    for number, case in enumerate(cases):
        groups = make_groups(case.layout, datetime.timedelta(seconds=100), seed=1)  # once: each leaves its threads
        for family, algorithm in RUNS:
            if case.layout.expert > 1 and "moe" not in family:
                continue
            key = (number, family, algorithm)
            results[key] = _steps(f"{folder}/{family}", algorithm, case, groups)
            results[key]["grads"] = _gradients(f"{folder}/{family}", algorithm, case, groups)
        parallel_state.destroy_model_parallel()
    return results if rank == 0 else {}


def make_policy(path: str, settings: Config, groups: Any) -> Any:
    from megarl.model.hf_config import HFConfig
    from megarl.objective.recipes import resolve
    from megarl.update.policy import Policy

    return Policy(settings, HFConfig.read(path), groups,
                  resolve(settings.objective, settings.rollout.max_response_tokens))


def make_experience(path: str, policy: Any, step: int = 0) -> Any:
    """The samples as the experience of a step, with log-probs and advantages; `step` seeds the minibatches."""
    from megarl.data.buffer import Taken
    from megarl.data.exchange import gather_table
    from megarl.update.experience import Experience

    samples, groups = read_samples(path), policy.groups
    local = samples.select(np.flatnonzero(samples.position % groups.layout.data == groups.dp))
    local = local if groups.is_leader else None
    taken = Taken(local, [], gather_table(local, groups), GROUPS, (), {})
    experience = Experience.build(taken, step, policy.config, policy.objective, groups, policy.pace, pad_token=0,
                                  replay=policy.replay)
    for minibatch in experience.minibatches:
        policy.reference_logprobs(minibatch)
        policy.old_logprobs(minibatch)
    experience.set_advantages()
    return experience


def _steps(path: str, algorithm: str, case: Case, groups: Any) -> dict[str, Any]:
    from megarl.checkpoint.hf_export import iter_hf_tensors

    policy = make_policy(path, config(path, algorithm, case, distributed=True), groups)
    experience = make_experience(path, policy)
    for chunk in policy.chunks:
        if chunk.routers is not None:
            chunk.routers.keep_choices = True
    for minibatch in experience.minibatches if case.layout.pipeline > 1 else ():
        _, instead = fitting(minibatch.schedule, case.layout.pipeline, minibatch.plan.slots, case.layout.chunks)
        assert minibatch.schedule == case.schedule and not instead, instead
    stats = [policy.update(minibatch) for minibatch in experience.passes()]
    weights = everywhere(iter_hf_tensors(policy.chunks, policy.hf))
    margin = min((c.routers.margin for c in policy.chunks if c.routers is not None), default=1.0)
    return {"stats": stats, "weights": weights, "margin": margin}


def _gradients(path: str, algorithm: str, case: Case, groups: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first step by HF name; without the distributed optimizer, which keeps only shards of them."""
    from megarl.checkpoint.hf_export import iter_hf_tensors

    policy = make_policy(path, config(path, algorithm, case, distributed=False), groups)
    policy.gradients(make_experience(path, policy).minibatches[0])
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return everywhere(iter_hf_tensors(policy.chunks, policy.hf))


def everywhere(tensors: Any) -> dict[str, torch.Tensor]:
    """All stages' tensors, on all ranks (rank 0 of each stage has its own)."""
    import torch.distributed as dist

    mine = {name: tensor.to("cpu", copy=True) for name, tensor in tensors if tensor is not None}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: tensor for part in parts for name, tensor in part.items()}


def reference(folder: str, family: str, algorithm: str) -> dict[str, Any]:
    """The first optimizer step by transformers: loss, entropy and gradients by name. The policy equals its reference
    there, so the KL is 0 and has no gradient."""
    from megarl.data.table import cut_minibatches

    path = Path(folder) / family
    model, samples = models.hf_model(family).train(), read_samples(path)
    groups = samples.position
    members = cut_minibatches(_Table(samples), STEPS, np.ones(len(samples), bool), 3 * 1_000_003)[0]
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    gate_rows: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(gates))}
    for number, gate in enumerate(gates):
        gate.register_forward_hook(lambda module, inputs, _, number=number: gate_rows[number].append(
            torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].size(-1)), module.weight)))
    loss, entropy, rows, ends = torch.zeros(()), 0.0, _rows(samples), np.cumsum(samples.response_lengths)
    for i in members:
        peers = samples.rewards[groups == groups[i]]
        std = np.sqrt(((peers - peers.mean()) ** 2).sum() / (len(peers) - 1))
        advantage = (samples.rewards[i] - peers.mean()) / (std + 1e-6)
        logprobs, entropies = _hf_logprobs(model, rows[i], 0.8)
        engine = torch.from_numpy(samples.logprobs[ends[i] - samples.response_lengths[i]:ends[i]])
        weight = (logprobs.detach() - engine).exp().clamp(max=1.05)
        log_ratio = logprobs - logprobs.detach()
        ratio = (log_ratio.mean() if algorithm == "gspo" else log_ratio).exp()
        per_token = -weight * ratio * advantage - ENTROPY * entropies
        loss = loss + per_token.mean() / len(members)
        entropy += float(entropies.detach().sum())
    total, tokens = loss, int(samples.lengths[members].sum())
    for layer_rows in gate_rows.values():
        if layer_rows:
            logits = torch.cat(layer_rows)
            chosen = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0)
            fractions = chosen.sum(0) / (2 * tokens)
            total = total + BALANCE * logits.size(1) * (fractions * logits.softmax(-1)).sum() / tokens
            total = total + Z * logits.logsumexp(-1).square().sum() / tokens
    total.backward()
    return {"loss": float(loss.detach()), "entropy": entropy / samples.response_lengths[members].sum(),
            "grads": _by_checkpoint_name(model)}


class _Table:
    """What `cut_minibatches` asks of a table."""

    def __init__(self, samples: SampleBatch) -> None:
        self.group = samples.position

    def __len__(self) -> int:
        return len(self.group)


def _by_checkpoint_name(model: Any) -> dict[str, torch.Tensor]:
    """Gradients under the names of the saved checkpoint (transformers may hold experts stacked in memory)."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("layouts")
    for family in ("qwen3", "qwen3_moe"):
        models.save_hf_model(family, place / family)
        write_samples(place / family, family)
    return place


@cache
def single(folder: Path) -> dict[str, Any]:
    return run_world(1, train, str(folder), CASES[1])[0]


def differences(ours: dict[str, Any], theirs: dict[str, Any], bound: float = 1e-6) -> list[str]:
    """What is not within the bounds; that of gradients is `bound` times the largest."""
    wrong = []
    first, expected = ours["stats"][0], theirs["stats"][0]
    for name in ("policy/loss", "moe/balance_loss", "moe/z_loss", "policy/entropy", "policy/kl_old"):
        if name in expected and abs(first[name] - expected[name]) > 1e-6:
            wrong.append(f"{name} {first[name]} {expected[name]}")
    for step, (one, other) in enumerate(zip(ours["stats"], theirs["stats"], strict=True)):
        if abs(one["optim/grad_norm"] / other["optim/grad_norm"] - 1) > 1e-5:
            wrong.append(f"step {step}: norm {one['optim/grad_norm']} {other['optim/grad_norm']}")
    largest = max(float(tensor.abs().max()) for tensor in theirs["grads"].values())
    wrong += _far(ours["grads"], theirs["grads"], bound * largest, "gradient")
    return wrong + _far(ours["weights"], theirs["weights"], 1e-6, "weight")


def _far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float, what: str) -> list[str]:
    assert ours.keys() == theirs.keys()
    gaps = {name: float((tensor - theirs[name]).abs().max()) for name, tensor in ours.items()}
    return [f"{what} {name}: {gap:.1e} > {bound:.1e}" for name, gap in gaps.items() if not gap <= bound]


def test_single_process_equals_transformers(folder: Path):
    for family in ("qwen3", "qwen3_moe"):
        for algorithm in ("grpo", "gspo"):
            expected = reference(str(folder), family, algorithm)
            ours = single(folder)[0, family, algorithm]
            assert ours["stats"][0]["policy/loss"] == pytest.approx(expected["loss"], abs=1e-6)
            assert ours["stats"][0]["policy/entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
            largest = max(float(tensor.abs().max()) for tensor in expected["grads"].values())
            assert _far(ours["grads"], expected["grads"], 2e-6 * largest, "gradient") == []
            assert ours["stats"][1]["policy/kl_old"] > 1e-7  # later steps are off the proximal policy
            assert ours["stats"][0]["engine/is_cut"] > 0.05
            assert ours["margin"] > 2e-5  # no near-tie of two experts that rounding could turn over


@pytest.mark.parametrize("ranks", CASES)
def test_layouts_agree(ranks: int, folder: Path):
    results = single(folder) if ranks == 1 else run_world(ranks, train, str(folder), CASES[ranks])[0]
    wrong = {}
    for (number, family, algorithm), ours in results.items():
        alone = ranks == 1 and CASES[1][number].max_tokens == SMALL  # summed up in small parts: rounds a little more
        same_cap = 3 if ranks > 1 and CASES[ranks][number].max_tokens == SMALL else 0
        found = differences(ours, single(folder)[same_cap, family, algorithm], 2e-6 if alone else 1e-6)
        if found:
            wrong[f"{CASES[ranks][number].layout.describe()} {family} {algorithm}"] = found
    assert not wrong, "\n".join(f"{case}: {'; '.join(found)}" for case, found in wrong.items())
