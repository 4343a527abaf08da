"""One optimizer step, from samples to weights, on a GPU against the same on a CPU.

fp32: rounding is 6e-8 an operation. Layouts, which only change the order of sums, agree to 1e-6 of the largest gradient
(tests/parity); other kernels also round exp, rsqrt, sin and cos otherwise, a few ulp each in four layers: 20 times that
is allowed. Adam's first change of a weight is lr g / (|g| + eps), of slope lr / eps at most.

bf16: what the CPU itself loses with bf16 against its fp32 result is the measure; a GPU may lose twice that. Experts are
chosen as in fp32, since a choice that turns over is no rounding.
"""

from __future__ import annotations

import datetime
import importlib.util
from typing import Any

import models
import pytest
import torch
from parity import test_layouts as parity
from worlds import run_world

FAMILIES = ("qwen3", "qwen3_moe")
EPS = 1e-3


def step(rank: int, path: str, dtype: str, implementation: str, choices: torch.Tensor | None) -> dict[str, Any]:
    """Statistics, gradients and changes of weights by Hugging Face name (fp32, on the host), and the experts chosen."""
    from megatron.core import parallel_state

    from megarl.checkpoint.hf_export import iter_hf_tensors
    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout
    from megarl.config.schema import Config

    tree = parity.config(path, "gspo", parity.Case(Layout(1), 2000), distributed=True).model_dump()
    tree["model"] |= {"dtype": dtype, "implementation": implementation}
    tree["batch"] |= {"minibatches": 1}
    tree["optim"] |= {"lr": 1e-2, "eps": EPS, "warmup_steps": 0}  # changes above the steps of bf16 weights
    groups = make_groups(Layout(1), datetime.timedelta(seconds=100), seed=1)
    policy = parity.make_policy(path, Config.model_validate(tree), groups)

    def tensors() -> dict[str, torch.Tensor]:
        return {name: tensor.float().cpu().clone() for name, tensor in
                iter_hf_tensors(policy.chunks, policy.hf)}

    routers = policy.chunks[0].routers
    if routers is not None:
        routers.keep_choices = True
        if choices is not None:
            policy.chunks[0].register_forward_pre_hook(lambda chunk, args: _route(chunk, args[0], choices))
    minibatch, = parity.make_experience(path, policy).minibatches
    before = tensors()
    policy.gradients(minibatch)
    parameters = list(policy.chunks[0].parameters())
    with torch.no_grad():
        weights = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        grads = tensors()
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    stats = policy.step(minibatch)
    after = tensors()
    chosen = None if routers is None else torch.stack([routers.choices[n].cpu() for n in range(len(routers.counts))])
    parallel_state.destroy_model_parallel()
    return {"stats": stats, "grads": grads, "changes": {name: after[name] - before[name] for name in after},
            "choices": chosen, "microbatches": len(minibatch.batches)}


def _route(chunk: Any, batch: Any, choices: torch.Tensor) -> None:
    """Have a forward take these experts, int64 [layers, tokens, k]."""
    batch.experts.update({layer: rows.to(batch.tokens_t.device, torch.int16) for layer, rows in enumerate(choices)})
    chunk.routers.routing = "replay"


@pytest.fixture(scope="module", params=FAMILIES)
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, where: str) -> dict[str, Any]:
    """The checkpoint's path, and the CPU's results in fp32 and bf16."""
    path = tmp_path_factory.mktemp("step") / request.param
    models.save_hf_model(request.param, path)
    parity.write_samples(path, request.param)
    fp32, = run_world(1, step, str(path), "fp32", "local", None)
    bf16, = run_world(1, step, str(path), "bf16", "local", fp32["choices"])
    assert fp32["microbatches"] == 1, "the recorded choices are those of one micro-batch"
    return {"path": str(path), "fp32": fp32, "bf16": bf16}


def test_fp32(on_cpu: dict[str, Any]) -> None:
    ours, theirs = step(0, on_cpu["path"], "fp32", "local", None), on_cpu["fp32"]
    if theirs["choices"] is not None:
        assert torch.equal(ours["choices"], theirs["choices"])
    for name in ("policy/loss", "policy/entropy", "moe/balance_loss", "moe/z_loss"):
        assert ours["stats"].get(name, 0.0) == pytest.approx(theirs["stats"].get(name, 0.0), abs=1e-5), name
    assert ours["stats"]["optim/grad_norm"] == pytest.approx(theirs["stats"]["optim/grad_norm"], rel=1e-4)
    bound = 2e-5 * max(float(tensor.abs().max()) for tensor in theirs["grads"].values())
    slope = theirs["stats"]["optim/lr"] / EPS
    for name, tensor in theirs["grads"].items():
        assert (ours["grads"][name] - tensor).abs().max() <= bound, name
        assert (ours["changes"][name] - theirs["changes"][name]).abs().max() <= bound * slope + 3e-7, name


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_bf16(on_cpu: dict[str, Any], implementation: str, where: str) -> None:
    if implementation == "transformer_engine" and (
            where == "cpu" or importlib.util.find_spec("transformer_engine") is None):
        pytest.skip("needs transformer-engine")
    ours, exact = step(0, on_cpu["path"], "bf16", implementation, on_cpu["fp32"]["choices"]), on_cpu["fp32"]
    assert ours["stats"]["policy/entropy"] == pytest.approx(exact["stats"]["policy/entropy"], rel=1e-2)
    assert ours["stats"]["optim/grad_norm"] == pytest.approx(exact["stats"]["optim/grad_norm"], rel=5e-2)
    for what in ("grads", "changes"):
        lost = distance(on_cpu["bf16"][what], exact[what])
        assert 1e-4 < lost < 0.5 and distance(ours[what], exact[what]) <= 2 * lost, what


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of all tensors together, relative to the length of theirs."""
    apart = sum(float((ours[name] - tensor).square().sum()) for name, tensor in theirs.items())
    return (apart / sum(float(tensor.square().sum()) for tensor in theirs.values())) ** 0.5
