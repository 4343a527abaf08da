"""Experts over optimizer steps: the bias that balances them, routers with a rate of their own, loads, the alarm.

Expectations are counted by hand from the experts that each router chose, as noted beside the run.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from test_layouts import Case, config, everywhere, make_experience, make_policy, write_samples
from worlds import run_world

from megarl.config.layout import Layout
from megarl.config.schema import Config

MOE_LAYERS = (2, 3)  # of glm4_moe: with two pipeline stages the first has no experts at all
RATE, EXPERTS, BIAS = 0.003, 8, "model.layers.{}.mlp.gate.e_score_correction_bias"
LAYOUTS = [Layout(2), Layout(2, tensor=2, sequence=True), Layout(2, pipeline=2), Layout(2, context=2),
           Layout(2, expert=2)]


def settings(path: str, layout: Layout, *, moe: dict[str, Any] | None = None, **balance: float) -> Config:
    tree = config(path, "grpo", Case(layout), distributed=True).model_dump()
    tree["moe"] |= moe or {}
    tree["model"]["balance"] |= balance
    return Config.model_validate(tree)


class Noted:
    """What the routers of a policy on one rank chose for real tokens: by layer the count of each expert."""

    def __init__(self, policy: Any) -> None:
        self.counts: dict[int, Counter[int]] = {}
        for chunk in policy.chunks:
            chunk.routers.keep_choices = True
            chunk.register_forward_hook(lambda chunk, args, _: self._add(chunk, args[0]))

    def _add(self, chunk: Any, batch: Any) -> None:
        for number, layer in enumerate(chunk.routers.layers):
            real = chunk.routers.choices[number][~batch.padding_t]
            self.counts.setdefault(layer, Counter()).update(real.flatten().tolist())

    def take(self) -> dict[int, list[int]]:
        """Since the last time."""
        found = {layer: [counts[e] for e in range(EXPERTS)] for layer, counts in self.counts.items()}
        self.counts = {}
        return found


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    from megarl.checkpoint.hf_export import iter_hf_tensors

    return everywhere(iter_hf_tensors(policy.chunks, policy.hf))


def alone(rank: int, folder: str, out: str) -> dict[str, Any]:
    """One process: every check that counts by hand."""
    from megarl.cluster.groups import make_groups

    groups = make_groups(Layout(1), datetime.timedelta(seconds=100), seed=1)
    glm, qwen = f"{folder}/glm4_moe", f"{folder}/qwen3_moe"
    return {"bias": bias_by_hand(glm, groups, out), "rates": rates(qwen, groups), "alarm": alarms(qwen, groups),
            "disagreement": disagreement(qwen, groups)}


def bias_by_hand(path: str, groups: Any, out: str) -> dict[str, Any]:
    """Biases before and after each update with the counts of its training forwards; then a checkpoint of them."""
    from megarl.checkpoint.state import Checkpoints, Progress
    from megarl.model.hf_config import HFConfig
    from megarl.rollout.embedded.weights import Weights

    policy = make_policy(path, settings(path, Layout(1), bias_rate=RATE), groups)
    noted, found = Noted(policy), []
    before = weights_of(policy)
    experience = make_experience(path, policy)
    for minibatch in experience.passes():
        noted.take()
        stats = policy.update(minibatch)
        after = weights_of(policy)
        found.append({"counts": noted.take(), "stats": stats,
                      "before": {n: before[BIAS.format(n)] for n in MOE_LAYERS},
                      "after": {n: after[BIAS.format(n)] for n in MOE_LAYERS}})
        before = after
    with policy._reference.swapped_in():
        start = weights_of(policy)
    kept = Checkpoints(Path(out), 1, policy.optimizer, {})
    kept.save(Progress(step=1))
    kept.finish()
    again = make_policy(path, settings(path, Layout(1), bias_rate=RATE), groups)
    loaded = Checkpoints(Path(out), 1, again.optimizer, {})
    loaded.load(Path(out) / "step_00000001")
    whole, engine = weights_of(again), Weights(HFConfig.read(path), torch.bfloat16)
    problems = [engine.problem(name, tuple(tensor.shape)) for name, tensor in whole.items()]
    for name, tensor in whole.items():
        engine.load(name, tensor)
    return {"updates": found,
            "reference": all(torch.equal(start[BIAS.format(n)], found[0]["before"][n]) for n in MOE_LAYERS),
            "saved": all(torch.equal(whole[name], before[name]) for name in before),
            "engine": [any(problems), *(torch.equal(engine.views[BIAS.format(n)], before[BIAS.format(n)])
                                        for n in MOE_LAYERS)]}


def rates(path: str, groups: Any) -> dict[float, dict[str, Any]]:
    """Changes of the weights in one update, by the factor of the routers' rate."""
    found = {}
    for factor in (1.0, 0.5, 0.0):
        policy = make_policy(path, settings(path, Layout(1), moe={"router_lr": factor}), groups)
        before = weights_of(policy)
        first, second, *_ = make_experience(path, policy).minibatches
        stats = policy.update(first)
        changes = {name: tensor - before[name] for name, tensor in weights_of(policy).items()}
        norm = {name: float(sum(p.main_grad.square().sum() for n, p in policy.chunks[0].named_parameters()
                                if ("router" in n) == (name == "router"))) for name in ("router", "others")}
        policy.optimizer.set_router_lr(0.0)  # in the middle of a run: its moments must not go on moving it
        middle = weights_of(policy)
        policy.update(second)
        moved = {name for name, tensor in weights_of(policy).items() if not torch.equal(tensor, middle[name])}
        found[factor] = {"changes": changes, "stats": stats, "norm": norm, "moved": moved, "lr": policy.optimizer.lr}
    return found


def alarms(path: str, groups: Any) -> dict[str, Any]:
    """What each action does to the updates of a run whose loads are never even enough."""
    from megarl.errors import UserMistake

    found: dict[str, Any] = {}
    for action in ("warn", "raise", "freeze", "stop"):
        alarm = {"collapse": {"entropy": 0.9999, "steps": 2, "action": action, "factor": 3.0}}
        policy = make_policy(path, settings(path, Layout(1), moe=alarm), groups)
        stats, routers = [], []
        experience = make_experience(path, policy)
        try:
            for minibatch in experience.passes():
                stats.append(policy.update(minibatch))
                routers.append({name: tensor for name, tensor in weights_of(policy).items() if "mlp.gate" in name})
        except UserMistake as mistake:
            found["stopped"] = str(mistake)
        found[action] = {"stats": stats, "routers": routers, "news": policy.news, "state": policy.collapse.state()}
    raising = {"collapse": {"entropy": 0.5, "action": "raise"}}
    resumed = make_policy(path, settings(path, Layout(1), moe=raising), groups)
    resumed.resume_collapse({"low": 1, "factor": 6.0, "frozen": 0.0})
    found["resumed"] = resumed.chunks[0].routers.coefficient / resumed.config.model.balance.coefficient
    found["passes"] = {first: _passes(path, groups, collapsed_first=first) for first in (True, False)}
    return found


def _passes(path: str, groups: Any, collapsed_first: bool) -> tuple[list[float], list[int]]:
    """Entropy and `low` at three updates on the same samples, the loads collapsed in the first one or in the others.

    Routers of zeros send all tokens to the same experts.
    """
    policy = make_policy(path, settings(path, Layout(1), moe={"collapse": {"entropy": 0.6, "steps": 5}}), groups)
    routers = [(router.weight.data, router.weight.data.clone()) for chunk in policy.chunks
               for router in chunk.router_modules()]

    def collapse(now: bool) -> None:
        for weight, start in routers:
            weight.copy_(start * (not now))

    collapse(collapsed_first)
    minibatch = make_experience(path, policy).minibatches[0]
    stats, low = [], []
    for number in range(3):
        collapse(collapsed_first == (number == 0))
        stats.append(policy.update(minibatch)["moe/load_entropy"])
        low.append(policy.collapse.low)
    return stats, low


def disagreement(path: str, groups: Any) -> dict[str, Any]:
    """Choices of the old pass with those of some tokens changed, in the last layer, as an engine's: a known share."""
    policy = make_policy(path, settings(path, Layout(1), moe={"replay": "old"}), groups)
    minibatch = make_experience(path, policy).minibatches[0]
    before = [batch.per_token["old_logprobs"].clone() for batch in minibatch.batches]
    changed = swapped = 0
    for batch in minibatch.batches:
        rows = batch.experts[3]
        places = (~batch.padding_t).nonzero()[:, 0]
        rows[places[::3]] = (rows[places[::3]] + 1) % EXPERTS
        changed += len(places[::3])
        rows[places[1::3]] = rows[places[1::3]].flip(-1)  # the same set
        swapped += len(places[1::3])
        rows[places[-1]] = 255  # free
        changed -= int((len(places) - 1) % 3 == 0)
    policy.config = settings(path, Layout(1), moe={"replay": "engine"})
    policy.old_logprobs(minibatch)
    from megarl.update import experts

    stats = experts.statistics(policy.chunks, minibatch.loads, groups, minibatch.real_tokens)
    return {"stats": stats, "changed": changed, "swapped": swapped, "batches": len(minibatch.batches),
            "tokens": minibatch.real_tokens,
            "moved": any(not torch.equal(batch.per_token["old_logprobs"], old)
                         for batch, old in zip(minibatch.batches, before, strict=True))}


def on_two(rank: int, folder: str) -> dict[str, Any]:
    """The biases after each update, by layout."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    found, path = {}, f"{folder}/glm4_moe"
    for layout in LAYOUTS:
        groups = make_groups(layout, datetime.timedelta(seconds=100), seed=1)
        policy = make_policy(path, settings(path, layout, bias_rate=RATE), groups)
        after, stats = [], []
        for minibatch in make_experience(path, policy).passes():
            stats.append(policy.update(minibatch))
            whole = weights_of(policy)
            after.append({n: whole[BIAS.format(n)] for n in MOE_LAYERS})
        mine = [chunk.weights() for chunk in policy.chunks]  # every rank has its copy
        own = {int(name.split(".")[2]) + chunk.part.first_layer: tensor for chunk, named in
               zip(policy.chunks, mine, strict=True) for name, tensor in named.items() if name.endswith("expert_bias")}
        found[layout.describe()] = {"after": after, "own": own, "stats": stats}
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("experts")
    for family in ("qwen3_moe", "glm4_moe"):
        models.save_hf_model(family, place / family)
        write_samples(place / family, family)
    return place


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    return run_world(1, alone, str(folder), str(folder / "checkpoints"))[0]


def test_bias_by_hand(single: dict[str, Any]) -> None:
    """bias += rate * sign(mean - count), from the tokens of each update's own forwards; kept in fp32 everywhere."""
    for update in single["bias"]["updates"]:
        for layer, counts in update["counts"].items():
            mean = sum(counts) / EXPERTS
            steps = [RATE if count < mean else -RATE if count > mean else 0.0 for count in counts]
            expected = update["before"][layer] + torch.tensor(steps, dtype=torch.float64).float()
            assert torch.equal(update["after"][layer], expected), (layer, counts)
        assert update["stats"]["optim/grad_norm"] > 0
    assert single["bias"]["updates"][0]["after"][2].dtype == torch.float32
    assert single["bias"]["reference"], "the reference model keeps those that it started with"
    assert single["bias"]["saved"], "a checkpoint brings the biases back, to the bit"
    assert single["bias"]["engine"] == [False, True, True], "engines take them by name, unrounded"


def test_bias_is_the_same_on_every_layout(folder: Path, single: dict[str, Any]) -> None:
    expected = [update["after"] for update in single["bias"]["updates"]]
    for results in run_world(2, on_two, str(folder)):
        for layout, found in results.items():
            for one, other in zip(found["after"], expected, strict=True):
                assert all(torch.equal(one[layer], other[layer]) for layer in MOE_LAYERS), layout
            assert all(torch.equal(bias, expected[-1][layer]) for layer, bias in found["own"].items()), layout
            assert set(found["own"]) <= set(MOE_LAYERS)
            assert len(found["own"]) == 2 or "PP2" in layout
            for key in ("moe/load_entropy", "moe/load_max"):
                assert found["stats"][0][key] == pytest.approx(
                    single["bias"]["updates"][0]["stats"][key], abs=1e-9), layout


def test_load_entropy_by_hand(single: dict[str, Any]) -> None:
    """Of each update's own forwards, also where an earlier one has moved weights and biases."""
    assert len(single["bias"]["updates"]) > 2
    for update in single["bias"]["updates"]:
        for layer, counts in update["counts"].items():
            shares = np.array(counts) / sum(counts)
            entropy = -sum(share * math.log(share) for share in shares if share) / math.log(EXPERTS)
            assert update["stats"][f"moe/load_entropy/{layer}"] == pytest.approx(entropy, abs=1e-12)
            assert update["stats"][f"moe/load_max/{layer}"] == pytest.approx(shares.max() * EXPERTS, abs=1e-12)
        assert "moe/load_entropy/1" not in update["stats"], "layer 1 is dense"
        assert update["stats"]["moe/load_entropy"] == min(
            value for key, value in update["stats"].items() if key.startswith("moe/load_entropy/"))


def test_router_rates(single: dict[str, Any]) -> None:
    whole, half, none = (single["rates"][factor] for factor in (1.0, 0.5, 0.0))
    routers = {name for name in whole["changes"] if "mlp.gate.weight" in name}
    assert len(routers) == 4
    for name, change in whole["changes"].items():
        if name in routers:
            torch.testing.assert_close(half["changes"][name], change / 2, rtol=1e-3, atol=2e-7)  # of weights near 1
            assert float(change.abs().max()) > 1e-5 and not none["changes"][name].any()
        else:
            assert torch.equal(half["changes"][name], change) and none["changes"][name].any()
    assert whole["stats"]["optim/grad_norm"] == half["stats"]["optim/grad_norm"]
    others = whole["norm"]["others"] / (whole["norm"]["others"] + whole["norm"]["router"])
    assert none["stats"]["optim/grad_norm"] ** 2 == pytest.approx(whole["stats"]["optim/grad_norm"] ** 2 * others)
    assert others < 0.999
    assert none["norm"]["router"] == 0 < whole["norm"]["router"]
    for one in single["rates"].values():
        assert one["moved"] & routers == set() and len(one["moved"]) > 50
        assert one["stats"]["optim/lr"] == whole["stats"]["optim/lr"] > 0


def test_the_alarm_acts(single: dict[str, Any]) -> None:
    """Two updates with uneven loads in a row: routers are frozen in the second already, the loss grows in the third."""
    found = single["alarm"]
    warned, raised, frozen = (found[action] for action in ("warn", "raise", "freeze"))
    assert [len(found[action]["stats"]) for action in ("warn", "raise", "freeze", "stop")] == [3, 3, 3, 1]
    assert len(warned["news"]) == len(raised["news"]) == len(frozen["news"]) == 1
    assert "4 layers with uneven load for 2 optimizer steps" in warned["news"][0] and "moe.collapse" in found["stopped"]
    losses = [[one["moe/balance_loss"] for one in run["stats"]] for run in (warned, raised)]
    assert losses[1][:2] == losses[0][:2] and losses[1][2] == pytest.approx(3 * losses[0][2], rel=1e-5)
    assert raised["state"]["factor"] == 3.0 and found["resumed"] == 6.0
    for name in frozen["routers"][0]:
        first, second, third = (routers[name] for routers in frozen["routers"])
        assert torch.equal(first, second) and torch.equal(second, third)
        assert torch.equal(first, warned["routers"][0][name]) and not torch.equal(second, warned["routers"][1][name])
    assert frozen["stats"][1]["optim/grad_norm"] < warned["stats"][1]["optim/grad_norm"]  # without the routers


def test_the_alarm_judges_each_update_by_its_own_loads(single: dict[str, Any]) -> None:
    """Several passes over the same samples are several optimizer steps, each with routers of its own."""
    for collapsed_first, lows in ((True, [1, 0, 0]), (False, [0, 1, 2])):
        entropies, low = single["alarm"]["passes"][collapsed_first]
        assert [entropy < 0.6 for entropy in entropies] == [bool(one) for one in lows] and low == lows


def test_disagreement_by_hand(single: dict[str, Any]) -> None:
    found = single["disagreement"]
    compared = found["tokens"] - found["batches"]  # one free token in each
    assert found["changed"] > 10 and found["swapped"] > 10 and found["moved"]
    assert found["stats"]["moe/routing_disagreement/3"] == found["changed"] / compared
    assert [found["stats"][f"moe/routing_disagreement/{layer}"] for layer in range(3)] == [0.0] * 3
    whole = found["changed"] / (3 * found["tokens"] + compared)
    assert found["stats"]["moe/routing_disagreement"] == pytest.approx(whole, abs=1e-12)
    assert found["stats"]["moe/replayed"] == pytest.approx((3 * found["tokens"] + compared) / (4 * found["tokens"]))
