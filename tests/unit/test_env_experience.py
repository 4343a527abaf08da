"""Episodes in several samples, and turns credited apart, as they reach the loss: by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.config.layout import Layout
from megarl.config.schema import ObjectiveConfig
from megarl.data.batch import build_batch
from megarl.data.ragged import SampleBatch
from megarl.data.sample import Group, Prompt, Sample
from megarl.data.table import SampleTable
from megarl.objective.advantages import has_signal
from megarl.objective.recipes import resolve
from megarl.rollout.evaluate import sums

PROMPT = Prompt(7, 0, 0, "talk", np.array([1, 2], np.int32))


def sample(n: int, part: int, trained: str, reward: float, position: int = 7, **more) -> Sample:
    """`trained`: one letter per response token, x for one that is trained on."""
    mask = np.array([letter == "x" for letter in trained])
    return Sample(replace(PROMPT, position=position), n, 0, np.arange(len(mask), dtype=np.int32) + 3,
                  np.zeros(len(mask), np.float32), "stop", versions=[("a:0", 0, len(mask))], reward=reward, part=part,
                  trained=mask, **more)


def set_advantages(samples: list[Sample], **objective):
    """(advantages, weights, mask) of every response token, by sample."""
    from megarl.update.experience import Experience, Minibatch

    batch = SampleBatch.from_groups([Group(PROMPT, samples)])
    table = SampleTable(batch.position, batch.n, batch.part, batch.prompt_lengths, batch.response_lengths,
                        batch.trained_lengths, batch.rewards, batch.truncated, np.zeros(len(batch), np.int64),
                        np.arange(len(batch)))
    packed = build_batch(batch, np.arange(len(batch)), Layout(world=1),
                         per_token={"turn_advantages": batch.advantages})
    minibatch = Minibatch(np.arange(len(batch)), [packed], 0, 0, None, "", 0.0)
    task = np.array([number % 2 for number in batch.position])
    experience = Experience(table, [minibatch], 1, resolve(ObjectiveConfig(**objective), 10), False, task)
    experience.set_advantages()
    rows = [packed.sequence_t == number for number in range(len(batch))]
    ranges = [(row.nonzero()[0, 0] + 1, row.nonzero()[0, 0] + 1 + len(one.response_ids))
              for row, one in zip(rows, samples, strict=True)]
    return [[packed.per_token[name][begin:end] for begin, end in ranges] for name in ("advantages", "weights")] + [
        [packed.mask_t[begin:end] for begin, end in ranges]]


def test_parts_share_the_advantage_of_their_episode() -> None:
    samples = [sample(0, 0, "x.x", 3.0), sample(0, 1, ".xx", 3.0), sample(1, 0, "xx", 0.0), sample(2, 0, "x", 0.0)]
    advantages, weights, mask = set_advantages(samples, algorithm="dr_grpo", aggregation="sequence_mean")
    assert [row.tolist() for row in mask] == [[True, False, True], [False, True, True], [True, True], [True]]
    for row, one, kept in zip(advantages, [2, 2, -1, -1], mask, strict=True):  # of three episodes: mean 1
        assert row[kept].tolist() == [one] * int(kept.sum())
    expected = [1 / 12, 1 / 12, 1 / 6, 1 / 3]  # a third each, by the four, two and one tokens of the episode
    for row, one, kept in zip(weights, expected, mask, strict=True):
        torch.testing.assert_close(row[kept], torch.full((int(kept.sum()),), one))
    assert sum(float(row[kept].sum()) for row, kept in zip(weights, mask, strict=True)) == pytest.approx(1)


def test_turns_have_their_own_advantages() -> None:
    own = np.array([0.5, 0, -2], np.float32)
    samples = [sample(0, 0, "x.x", 1.0, advantages=own), sample(1, 0, "xx", 0.0)]
    advantages, _, mask = set_advantages(samples, algorithm="dr_grpo")
    assert advantages[0][mask[0]].tolist() == [0.5, -2] and advantages[1].tolist() == [-0.5, -0.5]


def test_a_deviation_over_each_task() -> None:
    samples = [sample(0, 0, "x", 1.0, 8), sample(1, 0, "x", 0.0, 8),
               sample(0, 0, "x", 100.0, 9), sample(1, 0, "x", 0.0, 9), sample(1, 1, "x", 0.0, 9)]
    advantages, _, _ = set_advantages(samples, algorithm="grpo", std_over="task", std_eps=0)
    # task 0: squares .25 * 2, one degree of freedom; task 1: 2500 * 2: both give .5 / sqrt(.5)
    assert [float(row[0]) for row in advantages] == pytest.approx([v / 2 / 0.5**0.5 for v in (1, -1, 1, -1, -1)])


def test_a_long_part_is_punished_once() -> None:
    samples = [sample(0, 0, "x" * 10, 1.0), sample(0, 1, "x" * 7, 1.0), sample(1, 0, "x", 1.0)]
    advantages, _, _ = set_advantages(samples, algorithm="dr_grpo", overlong_buffer=4)
    assert [float(row[0]) for row in advantages] == [-0.5, -0.5, 0.5]  # 1 - 1 for the longest part; 1


def test_turns_teach_though_episodes_earn_the_same() -> None:
    own = [np.array([0.5, 0, -0.5], np.float32), np.array([-0.5, 0, 0.5], np.float32)]
    samples = [sample(n, 0, "x.x", 1.0, advantages=one) for n, one in enumerate(own)]
    assert has_signal(Group(PROMPT, samples))
    flat = [sample(n, 0, "x.x", 1.0, advantages=0 * one) for n, one in enumerate(own)]
    assert not has_signal(Group(PROMPT, flat))


def test_evaluation_counts_episodes() -> None:
    from megarl.config.schema import EvalSetConfig

    samples = [sample(0, 0, "x.x", 1.0), sample(0, 1, "xx", 1.0), sample(0, 2, "xx", 1.0), sample(1, 0, "x", 0.0)]
    found = sums([Group(PROMPT, samples)], EvalSetConfig(path="x", pass_at=[1, 2], sampling={"samples": 2}))
    assert (found["samples"], found["reward"], found["prompts"], found["unscored"]) == (2, 0.5, 1, 0)
    assert (found["pass@1"], found["pass@2"], found["tokens"]) == (0.5, 1.0, 7)  # said, not heard
