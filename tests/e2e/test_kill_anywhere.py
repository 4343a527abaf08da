"""Kill -9 of any process at any moment: the run goes on, at lag 0 to the same bits. More: tests/bench/kills.py."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import kill_anywhere as jobs
import numpy as np
import pytest
from kill_anywhere import Kill

from megarl.data.groups_file import read_groups
from megarl.data.prompts import shuffled
from megarl.data.sample import Prompt

KILLS = [Kill("trainer 1", 3, "checkpoint", 0.01), Kill("engine", 2, "publish", 0.0),
         Kill("engine", 3, "evaluate", 0.0)]


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
    check_closed_forms(folder, f"killed{number}")


def check_closed_forms(folder: Path, run: str) -> None:
    """Order of the data and learning rate at every step are functions of its number, over lives and epochs."""
    rows = len((folder / "train.jsonl").read_text().splitlines())
    for line in jobs.samples(folder, run):
        epoch, place = divmod(line["position"], rows)
        assert (line["epoch"], line["index"]) == (epoch, shuffled(rows, 3, 0, epoch)[place])
        assert line["step"] == line["position"] // jobs.PROMPTS + 1
    assert rows < jobs.STEPS * jobs.PROMPTS  # an epoch ends within the run
    steps = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, jobs.STEPS + 1))
    for step in steps:  # two updates a step, a warm-up of four updates
        rates = [3e-3 * min(1, update / 4) for update in (2 * step["step"] - 1, 2 * step["step"])]
        assert step["optim/lr"] == pytest.approx(sum(rates) / 2, rel=1e-12)


def test_with_lag_nothing_is_lost_and_nothing_trained_twice(folder: Path):
    statuses = jobs.run(folder, "lag", lag=2, kill=Kill("trainer 0", 3, "logprobs", 0.0))
    assert statuses == [75, 0]
    trained = jobs.samples(folder, "lag")
    assert Counter((line["position"], line["n"]) for line in trained) == Counter(
        (position, n) for position in range(jobs.STEPS * jobs.PROMPTS) for n in range(jobs.SAMPLES))
    # what a checkpoint held was trained on afterwards as it was held
    checked = 0
    for path in (folder / "lag" / "checkpoints").glob("step_*/held.*.safetensors"):
        step = int(path.parent.name.removeprefix("step_"))
        groups = read_groups(path, lambda position: Prompt(position, 0, 0, "", np.zeros(1, np.int32)))
        for sample in (sample for group in groups.values() for sample in group.samples):
            (line,) = [one for one in trained if (one["position"], one["n"]) == (sample.prompt.position, sample.n)]
            assert line["step"] > step and line["response_ids"] == sample.response_ids.tolist()
            checked += 1
    assert checked > jobs.SAMPLES
