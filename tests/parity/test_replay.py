"""Routing replay: in training every router takes the experts that the engine took, on every layout and schedule.

The samples come from the embedded engine in bf16, trained in fp32: left free, routers would choose others for a part of
the tokens. What the routers of a rank chose is noted token by token, in every forward, also in recomputed ones.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from embedded_parts import answer_of, scheduler_for, submit
from test_layouts import (
    SMALL,
    Case,
    config,
    differences,
    everywhere,
    make_experience,
    make_policy,
    read_samples,
    scheduled,
)
from worlds import run_world

from megarl.config.layout import Layout
from megarl.config.schema import Config
from megarl.data.ragged import SampleBatch
from megarl.data.routing import RoutingShape
from megarl.data.sample import Group, Prompt, Sample
from megarl.rollout.protocol import GenerateRequest, Sampling, parse_generate

GROUPS, SAMPLES, LAYERS, EXPERTS, K = 9, 4, 4, 8, 2
FREE = 255
CASES = {1: [Case(Layout(1)), Case(Layout(1), SMALL)],
         2: [Case(Layout(2, tensor=2, sequence=True)), Case(Layout(2, expert=2)), Case(Layout(2, pipeline=2)),
             Case(Layout(2, context=2)), scheduled("zb-h1", 2, 2), scheduled("dualpipev", 2, 2)],
         4: [Case(Layout(4, tensor=2, context=2, sequence=True)), scheduled("dualpipe", 4, 2, expert=2)]}
RECOMPUTED = (2, 4)  # the cases of two ranks that also run with recomputed layers


def sampled(path: Path, dtype: str = "bfloat16") -> SampleBatch:
    """Groups as the embedded engine answers them: its tokens, log-probs and experts, through the client's checks."""
    scheduler, random = scheduler_for(path, slots=24, routing=True, dtype=dtype), np.random.default_rng(11)
    shape, asked = RoutingShape(LAYERS, tuple(range(LAYERS)), EXPERTS, K), []
    for position in range(GROUPS):
        request = GenerateRequest(f"r{position}/", random.integers(2, 99, random.integers(1, 12)).astype(np.int32),
                                  Sampling(int(random.integers(1, 25)), 0.8, n=SAMPLES),
                                  tuple(range(position * SAMPLES, (position + 1) * SAMPLES)), shape)
        asked.append((request, submit(scheduler, request.to_json(), routing=True)))
    while scheduler.step():
        pass
    groups = []
    for position, (request, generate) in enumerate(asked):
        prompt = Prompt(position, 0, position, "test", request.input_ids)
        done = parse_generate(answer_of(generate), request, 99)
        groups.append(Group(prompt, [
            Sample(prompt, n, 0, one.response_ids, one.logprobs, one.finish, reward=float(random.integers(0, 3)),
                   experts=one.experts) for n, one in enumerate(done)]))
    return SampleBatch.from_groups(groups)


class Watch:
    """Notes how often a router's choice of a token was not the engine's, in the forwards and recomputes of a policy."""

    def __init__(self, policy: Any, samples: SampleBatch) -> None:
        self.starts = np.concatenate(([0], np.cumsum(samples.lengths)[:-1]))
        self.experts, self.active = torch.from_numpy(samples.experts.astype(np.int64)).sort(-1).values, True
        self.seen = self.other = self.free = self.turned = 0
        self.first: dict[tuple[int, int], torch.Tensor] = {}  # choices of the old pass, by micro-batch and layer
        for chunk in policy.chunks:
            for number, router in enumerate(chunk.router_modules()):
                router.register_forward_hook(
                    lambda router, args, out, chunk=chunk, number=number: self._compare(chunk, number))

    def _compare(self, chunk: Any, number: int) -> None:
        if not self.active:
            return
        batch, layer = chunk.routers._batch, chunk.routers.layers[number]
        chosen = chunk.routers.choices[number].sort(-1).values
        starts = torch.from_numpy(np.append(self.starts[batch.samples.numpy()], 0))
        real = ~batch.padding_t
        places = torch.where(real, starts[batch.sequence_t] + batch.positions_t, 0)
        if chunk.config.sequence_parallel:
            tp = chunk.pg_collection.tp
            places, real = (whole.chunk(tp.size())[tp.rank()] for whole in (places, real))
        before = self.first.setdefault((id(batch), layer), chosen)
        self.turned += int((chosen != before)[real].any(-1).sum())
        given = self.experts[places, layer]
        has = real & (given[:, 0] != FREE)
        self.seen += int(has.sum())
        self.free += int((real & ~has).sum())
        self.other += int((chosen != given)[has].any(-1).sum())


def settings(path: str, case: Case, replay: str, distributed: bool = True, **model: Any) -> Config:
    tree = config(path, "gspo", case, distributed).model_dump()
    tree["moe"]["replay"] = replay
    tree["model"] |= model
    return Config.model_validate(tree)


def train(rank: int, path: str, cases: list[Case], recomputed: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each case with the engine's routing replayed; the first one, on one rank, also free and with the old pass's."""
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups

    results = []
    for number, case in enumerate(cases):
        groups = make_groups(case.layout, datetime.timedelta(seconds=100), seed=1)
        variants = [("engine", "none")]
        variants += [("engine", "full")] * (number in recomputed)
        variants += [("none", "none"), ("old", "none"), ("old", "full")] * (case.layout.world == 1 and number == 0)
        for replay, recompute in variants:
            found = steps(path, settings(path, case, replay, recompute=recompute), groups, replay)
            results.append({"case": number, "replay": replay, "recompute": recompute, **found})
        parallel_state.destroy_model_parallel()
    return results


def steps(path: str, config: Config, groups: Any, replay: str) -> dict[str, Any]:
    """An optimizer step for each minibatch, watched."""
    from megarl.checkpoint.hf_export import iter_hf_tensors

    policy = make_policy(path, config, groups)
    for chunk in policy.chunks:
        chunk.routers.keep_choices = True
    watch, whole = Watch(policy, read_samples(path)), policy.reference_logprobs

    def reference(minibatch: Any) -> None:
        """The reference model routes freely."""
        watch.active = False
        whole(minibatch)
        watch.active = True

    policy.reference_logprobs = reference
    experience = make_experience(path, policy)
    forwards = watch.seen
    stats = [policy.update(minibatch) for minibatch in experience.passes()]
    gap = torch.cat([(batch.per_token["old_logprobs"] - batch.per_token["engine_logprobs"])[batch.mask_t].abs()
                     for minibatch in experience.minibatches for batch in minibatch.batches
                     if "old_logprobs" in batch.per_token] or [torch.zeros(0)])
    weights = everywhere(iter_hf_tensors(policy.chunks, policy.hf))
    return {"stats": stats, "weights": weights, "seen": watch.seen, "other": watch.other, "free": watch.free,
            "turned": watch.turned, "old pass": forwards, "gap": gap.tolist()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replay")
    models.save_hf_model("qwen3_moe", place)
    torch.save(vars(sampled(place)), place / "samples.pt")
    return place


@pytest.fixture(scope="module")
def single(path: Path) -> list[dict[str, Any]]:
    return run_world(1, train, str(path), CASES[1], ())[0]


def only(results: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(one for one in results if all(one[key] == value for key, value in wanted.items()))


def tokens_with_experts(path: Path) -> int:
    """Of all layers."""
    samples = read_samples(path)
    return int((samples.lengths - 1).sum()) * LAYERS


def test_routers_take_the_engine_s_experts(path: Path, single: list[dict[str, Any]]) -> None:
    """All tokens but each sample's last one, in every layer, both in the old pass and in training."""
    samples, expected = read_samples(path), tokens_with_experts(path)
    for number in range(2):
        one = only(single, case=number, replay="engine")
        assert (one["old pass"], one["seen"], one["other"]) == (expected, 2 * expected, 0)
        assert one["free"] == 2 * len(samples) * LAYERS  # each sample's last token
    free = only(single, replay="none")
    assert free["seen"] == 2 * expected and free["other"] > 0.005 * free["seen"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_every_layout(ranks: int, path: Path, single: list[dict[str, Any]]) -> None:
    """Also where layers are recomputed while other micro-batches are in flight; and the steps are the same."""
    world = run_world(ranks, train, str(path), CASES[ranks], RECOMPUTED if ranks == 2 else ())
    alone, small = (only(single, case=number, replay="engine") for number in range(2))
    wrong = []
    for number, case in enumerate(CASES[ranks]):
        for recompute in ("none", "full"):
            runs = [only(results, case=number, recompute=recompute) for results in world
                    if any(one["case"] == number and one["recompute"] == recompute for one in results)]
            if not runs:
                continue
            where = f"{case.layout.describe()} {case.schedule} recompute {recompute}"
            forwards = 3 if recompute == "full" else 2
            seen, other = (sum(one[name] for one in runs) for name in ("seen", "other"))
            if other or seen != forwards * tokens_with_experts(path):
                wrong.append(f"{where}: {other} of {seen} choices are others, {tokens_with_experts(path)} a pass")
            same = small if case.max_tokens == SMALL else alone
            found = differences({**runs[0], "grads": {"none": torch.zeros(1)}},
                                {**same, "grads": {"none": torch.zeros(1)}})
            wrong += [f"{where}: {one}" for one in found]
            if not 0 < runs[0]["stats"][0]["moe/routing_disagreement"] == pytest.approx(
                    alone["stats"][0]["moe/routing_disagreement"], abs=2e-3):
                wrong.append(f"{where}: disagreement {runs[0]['stats'][0]['moe/routing_disagreement']}")
    assert not wrong, "\n".join(wrong)


def test_log_probs_come_nearer(single: list[dict[str, Any]]) -> None:
    """What remains of the gap is bf16 against fp32 arithmetic, without experts that were changed."""
    replayed, free = (np.array(only(single, case=0, replay=replay)["gap"]) for replay in ("engine", "none"))
    assert len(replayed) == len(free) > 300
    assert replayed.mean() < 0.9 * free.mean() and replayed.max() < 0.8 * free.max()


def test_the_old_pass_s_routing(path: Path, single: list[dict[str, Any]]) -> None:
    """R2: choices stay those of the old pass although weights change; the first step is that of free routing."""
    free, old, again = (only(single, case=0, replay=replay, recompute=recompute)
                        for replay, recompute in (("none", "none"), ("old", "none"), ("old", "full")))
    for one in (old, again):
        assert one["stats"][0]["policy/loss"] == pytest.approx(free["stats"][0]["policy/loss"], abs=1e-7)
        assert one["stats"][0]["optim/grad_norm"] == pytest.approx(free["stats"][0]["optim/grad_norm"], rel=1e-6)
        assert one["turned"] == 0 and "moe/routing_disagreement" not in one["stats"][0]
    assert free["turned"] > 0
