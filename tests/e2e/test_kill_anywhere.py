"""Kill -9 of any process at any moment: the run goes on, to the same bits at lag 0. More seeds: tests/bench/kills.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import kill_anywhere as jobs
import pytest
from kill_anywhere import Kill

from megarl.data.groups_file import read_groups
from megarl.data.sample import Prompt

KILLS = [Kill("trainer 1", 3, "checkpoint", 0.01), Kill("engine", 2, "publish", 0.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kills")
    jobs.prepare(place)
    assert jobs.run(place, "whole") == [0]
    return place


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_without_lag_the_end_is_equal_to_the_bit(folder: Path, number: int):
    statuses = jobs.run(folder, f"killed{number}", kill=KILLS[number])
    assert len(statuses) == (1 if KILLS[number].victim == "engine" else 2)
    assert jobs.differences(folder, f"killed{number}", "whole") == []


def test_with_lag_nothing_is_lost_and_nothing_trained_twice(folder: Path):
    statuses = jobs.run(folder, "lag", lag=2, kill=Kill("trainer 0", 3, "logprobs", 0.0))
    assert statuses == [75, 0]
    trained = jobs.samples(folder, "lag")
    assert Counter((line["position"], line["n"]) for line in trained) == Counter(
        (position, n) for position in range(jobs.STEPS * jobs.PROMPTS) for n in range(jobs.SAMPLES))
    # what a checkpoint held was trained on afterwards as it was held
    import numpy as np

    checked = 0
    for path in (folder / "lag" / "checkpoints").glob("step_*/held.*.safetensors"):
        step = int(path.parent.name.removeprefix("step_"))
        groups = read_groups(path, lambda position: Prompt(position, 0, 0, "", np.zeros(1, np.int32)))
        for sample in (sample for group in groups.values() for sample in group.samples):
            (line,) = [one for one in trained if (one["position"], one["n"]) == (sample.prompt.position, sample.n)]
            assert line["step"] > step and line["response_ids"] == sample.response_ids.tolist()
            checked += 1
    assert checked > jobs.SAMPLES
