"""Experiences on disk: what is read is what was written, by any number of leaders, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.dump import Recorded, differences, joined, read_parts, write_config, write_part
from megarl.data.ragged import SampleBatch
from megarl.errors import UserMistake

METRICS = {"reward/mean": 0.1 + 0.2, "rollout/retries": 0.0}


def batch(samples: int, seed: int, experts: bool = False) -> SampleBatch:
    draw = np.random.default_rng(seed)
    prompt, response = draw.integers(1, 5, samples), draw.integers(0, 6, samples)
    tokens, answers = int((prompt + response).sum()), int(response.sum())
    return SampleBatch(
        position=draw.integers(0, 2**40, samples), n=np.arange(samples), prompt_lengths=prompt,
        response_lengths=response, tokens=draw.integers(0, 99, tokens).astype(np.int32),
        logprobs=-draw.random(answers).astype(np.float32), rewards=draw.random(samples), truncated=response == 5,
        part=draw.integers(0, 2, samples), versions=draw.integers(-1, 9, answers).astype(np.int32),
        experts=draw.integers(0, 300, (tokens, 2, 4)).astype(np.uint16) if experts else None)


def equal(one: SampleBatch, other: SampleBatch) -> bool:
    """Every array equal to the bit, and of the same type."""
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(SampleBatch)]
    return all((a is None and b is None) or (a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape)
               for a, b in pairs)


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, experts: bool):
    written = Recorded(batch(7, 0, experts), "try1:4", 2**50, (3, 5), METRICS)
    path = write_part(tmp_path, 5, 0, 1, written)
    assert path.name == "step_0005.part0of1.safetensors" and list(tmp_path.iterdir()) == [path]
    (got,) = read_parts(tmp_path, 5, 0, 1)
    assert equal(got.samples, written.samples)
    assert (got.version, got.position, got.unfinished, got.metrics) == ("try1:4", 2**50, (3, 5), METRICS)


def test_every_array_of_a_sample_batch_is_covered():
    """A field added later travels too: the file is made from the fields, and this batch sets them all."""
    assert all(getattr(batch(3, 0, experts=True), one.name) is not None for one in fields(SampleBatch))


@pytest.mark.parametrize("leaders", [1, 2, 3, 5])
def test_any_number_of_leaders_reads_what_three_have_written(tmp_path: Path, leaders: int):
    parts = [batch(n, n) for n in (3, 0, 4)]
    for number, samples in enumerate(parts):
        write_part(tmp_path, 1, number, 3, Recorded(samples, "a:0", 9, (), METRICS))
    found = [joined(read_parts(tmp_path, 1, leader, leaders)) for leader in range(leaders)]
    positions = np.concatenate([one.position for one in found if one is not None])
    assert sorted(positions) == sorted(np.concatenate([one.position for one in parts]))
    if leaders == 1:
        assert equal(found[0].select(range(3)), parts[0]) and equal(found[0].select(range(3, 7)), parts[2])


def test_what_is_missing_or_damaged_is_named(tmp_path: Path):
    for number in (0, 1):
        write_part(tmp_path, 3, number, 2, Recorded(batch(2, number), "a:0", 9, (), METRICS))
    with pytest.raises(UserMistake, match="no step 4: it has steps 3 to 3"):
        read_parts(tmp_path, 4, 0, 1)
    with pytest.raises(UserMistake, match="no step 1: it has none"):
        read_parts(tmp_path / "nowhere", 1, 0, 1)
    second = tmp_path / "step_0003.part1of2.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-3])
    with pytest.raises(UserMistake, match="part1of2.*damaged"):
        read_parts(tmp_path, 3, 0, 1)
    second.unlink()
    with pytest.raises(UserMistake, match="not whole: there are step_0003.part0of2"):
        read_parts(tmp_path, 3, 0, 1)
    (tmp_path / "step_0003.part0of1.safetensors").write_bytes(whole)
    with pytest.raises(UserMistake, match="not whole"):
        read_parts(tmp_path, 3, 0, 1)


def test_only_some_parts_with_experts_are_refused():
    parts = [Recorded(batch(2, 0, experts), "a:0", 9, (), METRICS) for experts in (True, False)]
    with pytest.raises(ValueError, match="only some parts have experts"):
        joined(parts)
    assert joined([]) is None
    empty = Recorded(SampleBatch.from_groups([]), "a:0", 9, (), METRICS)
    assert equal(joined([empty, parts[0]]), parts[0].samples) and len(joined([empty, empty])) == 0


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path):
    samples = batch(2, 0)
    object.__setattr__(samples, "logprobs", samples.logprobs[:-1])
    write_part(tmp_path, 1, 0, 1, Recorded(samples, "a:0", 9, (), METRICS))
    with pytest.raises(UserMistake, match="damaged"):
        read_parts(tmp_path, 1, 0, 1)


def test_settings_that_samples_depend_on(tmp_path: Path):
    config = {"model": {"path": "a"}, "rollout": {"temperature": 1.0, "stop": ["x"], "slots": 8}, "optim": {"lr": 1e-6},
              "data": {}, "reward": {"terms": [{"name": "exact"}]}}
    write_config(tmp_path, config)
    assert differences(tmp_path, json.loads(json.dumps(config))) == {}
    other = config | {"rollout": {"temperature": 0.7, "stop": ["x"], "slots": 9}, "optim": {"lr": 1.0}}
    assert differences(tmp_path, other) == {"rollout.temperature": (1.0, 0.7)}
    with pytest.raises(UserMistake, match=r"config\.json: no such file"):
        differences(tmp_path / "nowhere", config)


def test_a_rewritten_step_replaces_the_old_one(tmp_path: Path):
    for reward in (0.0, 1.0):
        one = batch(2, 0)
        write_part(tmp_path, 1, 0, 1, Recorded(replace(one, rewards=one.rewards * 0 + reward), "a:0", 9, (), METRICS))
    assert read_parts(tmp_path, 1, 0, 1)[0].samples.rewards.tolist() == [1.0, 1.0]
