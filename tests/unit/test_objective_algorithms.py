"""The five algorithms from rewards to loss against a second implementation: plain Python loops over the papers' sums.

Batches are random and ragged. Also: the loss does not depend on how samples are dealt to micro-batches or in which
order they come.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from megarl.objective.advantages import group_advantages, overlong_punishment, token_weights
from megarl.objective.policy import SUMS, policy_loss
from megarl.objective.recipes import resolve

ALGORITHMS = ("grpo", "gspo", "gspo_token", "dapo", "dr_grpo")
CLIP = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4), "dapo": (0.2, 0.28),
        "dr_grpo": (0.2, 0.2)}
MAX_TOKENS, BUFFER, KL, BONUS, CAP = 8, 3, 0.1, 0.01, 1.5


@dataclass
class Response:
    """One sample: per-token log-probs and entropies, its group, reward, and whether the length limit cut it."""

    group: int
    reward: float
    truncated: bool
    new: list[float]
    old: list[float]
    ref: list[float]
    engine: list[float]
    entropy: list[float]


def make_batch(seed: int, spread: float) -> list[Response]:
    """Three groups of up to four ragged responses; at least one is not truncated."""
    rng, batch = random.Random(seed), []
    for group in range(3):
        for _ in range(rng.randint(1, 4)):
            length = rng.randint(1, MAX_TOKENS)
            old = [rng.uniform(-4, -0.1) for _ in range(length)]
            near = [[x + spread * scale * rng.gauss(0, 1) for x in old] for scale in (1, 2, 2)]
            batch.append(Response(group, float(rng.randint(0, 1)), bool(batch) and rng.random() < 0.3, near[0], old,
                                  near[1], near[2], [rng.uniform(0, 3) for _ in old]))
    return batch


def loss_by_loops(algorithm: str, batch: list[Response], held: list[Response] | None = None) -> float:
    """The step's loss by the papers' formulas, overlong punishment, filter, k3, bonus and truncated weights included.

    `held` gives the log-probs under the stop-gradient of GSPO-token (eq. 14); by default those of `batch`.
    """
    low, high = CLIP[algorithm]
    rewards = [r.reward - min(1.0, max(0.0, (len(r.new) - (MAX_TOKENS - BUFFER)) / BUFFER)) for r in batch]
    kept = [i for i, r in enumerate(batch) if not r.truncated]
    total = 0.0
    for i in kept:
        r, h = batch[i], (held or batch)[i]
        group = [rewards[j] for j, other in enumerate(batch) if other.group == r.group]
        mean = sum(group) / len(group)
        advantage = rewards[i] - mean
        if algorithm != "dr_grpo" and len(group) > 1:
            advantage /= math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1)) + 1e-6
        length = len(r.new)
        sequence = math.exp(sum(n - o for n, o in zip(r.new, r.old, strict=True)) / length)
        held_sequence = math.exp(sum(n - o for n, o in zip(h.new, h.old, strict=True)) / length)
        of_sequence = 0.0
        for t in range(length):
            if algorithm == "gspo":
                ratio = sequence
            elif algorithm == "gspo_token":
                ratio = held_sequence * math.exp(r.new[t]) / math.exp(h.new[t])
            else:
                ratio = math.exp(r.new[t] - r.old[t])
            surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            surrogate *= min(math.exp(r.old[t] - r.engine[t]), CAP)
            kl = math.exp(r.ref[t] - r.new[t]) - (r.ref[t] - r.new[t]) - 1
            of_sequence += -surrogate + KL * kl - BONUS * r.entropy[t]
        if algorithm == "dapo":
            total += of_sequence / sum(len(batch[j].new) for j in kept)
        elif algorithm == "dr_grpo":
            total += of_sequence / MAX_TOKENS / len(kept)
        else:
            total += of_sequence / length / len(kept)
    return total


def objective(algorithm: str):
    return resolve(ObjectiveConfig(
        algorithm=algorithm, kl=KLConfig(coefficient=KL), entropy_bonus=BONUS, mask_truncated=True,
        overlong_buffer=BUFFER, correction=CorrectionConfig(kind="truncated", high=CAP)), MAX_TOKENS)


def loss_by_megarl(algorithm: str, batch: list[Response], parts: list[list[int]]):
    """(loss, gradient of each response's log-probs, statistics): the trained responses dealt to micro-batches `parts`.

    Every sequence is laid out as the packer does: a prompt position before it, padding behind, NaN in both.
    """
    one = objective(algorithm)
    lengths_n = torch.tensor([len(r.new) for r in batch])
    rewards_n = torch.tensor([r.reward for r in batch], dtype=torch.float64) + overlong_punishment(lengths_n, one)
    advantages = group_advantages(rewards_n, torch.tensor([r.group for r in batch]), one)
    kept = [i for i, r in enumerate(batch) if not r.truncated]
    weights = dict(zip(kept, token_weights(lengths_n[kept], one), strict=True))
    total, gradients, statistics = 0.0, {}, dict.fromkeys(SUMS, 0.0)
    for part in parts:
        members = [i for i in part if i in weights]

        def lay(field, members=members):
            rows = [[math.nan, *(field(batch[i], i)), math.nan] for i in members]
            return torch.tensor(sum(rows, []) + [math.nan], dtype=torch.float64)

        new_t = lay(lambda r, i: r.new).requires_grad_()
        mask_t = ~new_t.detach().isnan()
        owner_t = torch.tensor(sum(([k] * (len(batch[i].new) + 2) for k, i in enumerate(members)), []) + [len(members)])
        loss, stats = policy_loss(
            new_t, lay(lambda r, i: r.old), lay(lambda r, i: [advantages[i]] * len(r.new)),
            lay(lambda r, i: [weights[i]] * len(r.new)), mask_t, owner_t, len(members), one,
            entropy_t=lay(lambda r, i: r.entropy), ref_t=lay(lambda r, i: r.ref), engine_t=lay(lambda r, i: r.engine))
        loss.backward()
        total += loss.item()
        for k, i in enumerate(members):
            gradients[i] = new_t.grad[mask_t & (owner_t == k)].tolist()
        statistics = {name: statistics[name] + stats[name].item() for name in SUMS}
    return total, gradients, statistics


@pytest.mark.parametrize("spread", [1e-4, 0.3])  # inside GSPO's narrow clip, and beyond the wide ones
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_equals_the_loops(algorithm, spread):
    for seed in range(10):
        batch = make_batch(seed, spread)
        loss, _, stats = loss_by_megarl(algorithm, batch, [list(range(len(batch)))])
        assert loss == pytest.approx(loss_by_loops(algorithm, batch), rel=1e-10, abs=1e-12)
        assert stats["tokens"] == sum(len(r.new) for r in batch if not r.truncated)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_equals_differences_of_the_loops(algorithm):
    batch = make_batch(3, 0.1 if CLIP[algorithm][0] > 0.1 else 2e-4)
    _, gradients, _ = loss_by_megarl(algorithm, batch, [list(range(len(batch)))])

    def moved(i, t, step):
        new = list(batch[i].new)
        new[t] += step
        return [Response(**{**vars(r), "new": new}) if j == i else r for j, r in enumerate(batch)]

    step, checked = 1e-6, 0
    for i, r in enumerate(batch):
        for t in range(len(r.new)):
            want = sum(s * loss_by_loops(algorithm, moved(i, t, s * step), held=batch) for s in (1, -1)) / (2 * step)
            got = gradients[i][t] if i in gradients else 0.0
            assert got == pytest.approx(want, rel=1e-5, abs=1e-8), (i, t)
            checked += i in gradients and got != 0
    assert checked > 10


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALGORITHMS), st.integers(0, 10**6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_dealing_and_order_do_not_matter(algorithm, seed, micro_batches, rng):
    """Any deal of the samples to micro-batches, in any order, some of them empty: the same loss and gradients."""
    batch = make_batch(seed, 0.2)
    order = list(range(len(batch)))
    whole, gradients, statistics = loss_by_megarl(algorithm, batch, [order])
    rng.shuffle(order)
    parts = [[] for _ in range(micro_batches)]
    for i in order:
        parts[rng.randrange(micro_batches)].append(i)
    split, split_gradients, split_statistics = loss_by_megarl(algorithm, batch, parts)
    assert split == pytest.approx(whole, rel=1e-10, abs=1e-12)
    assert split_statistics == pytest.approx(statistics, rel=1e-10, abs=1e-12)
    assert split_gradients.keys() == gradients.keys()
    for i, gradient in gradients.items():
        assert split_gradients[i] == pytest.approx(gradient, rel=1e-10, abs=1e-12)

    permuted = [batch[i] for i in order]
    assert loss_by_megarl(algorithm, permuted, [order])[0] == pytest.approx(whole, rel=1e-10, abs=1e-12)
