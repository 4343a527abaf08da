"""A checkpoint's directory is whole or not there, at whatever moment its writer is killed."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint import files
from megarl.checkpoint.rules import is_fixed
from megarl.data.groups_file import read_groups, read_positions, write_groups
from megarl.data.sample import Group, Prompt, Sample


def write(directory: Path, step: int, content: str) -> None:
    """As a save does, with one file of data."""
    partial = files.begin(directory, step)
    (partial / "data").write_text(content)
    files.commit(partial, directory / f"step_{step:08d}", {"data": files.digest(partial / "data")})
    files.prune(directory, 2, 0)


def killed_at(point: int, directory: Path, step: int, content: str) -> bool:
    """Write in a child that is killed before its `point`-th flush, rename or removal; whether it came that far."""
    child = os.fork()
    if not child:
        left = point

        def fatal(real):
            def call(*args, **options):
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)
            return call

        for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
            setattr(os, name, fatal(getattr(os, name)))
        try:
            write(directory, step, content)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [3, 2])  # a new step, and one that an earlier life had reached
def test_killed_at_any_point_it_leaves_whole_checkpoints_only(tmp_path: Path, step: int):
    points = 0
    while True:
        points += 1
        directory = tmp_path / str(points)
        for old in (1, 2):
            write(directory, old, f"old {old}")
        if not killed_at(points, directory, step, "new"):
            break
        found = files.whole(directory)
        contents = {path.name[-1]: (path / "data").read_text() for path in found}
        assert all(files.damage(path, ["data"], files.expected(path)) == "" for path in found)
        # renaming over an older life's step 2 has a moment without it; step 1 is there then
        assert contents.get("2") in ("old 2", "new", None) and contents and contents.get("1", "old 1") == "old 1"
        assert len(contents) >= 2 or step == 2
        write(directory, step, "again")  # the next life is not in its way
        assert (directory / f"step_{step:08d}" / "data").read_text() == "again"
        assert not list(directory.glob(".partial_*")) and len(files.whole(directory)) == 2
    assert points > 8


def test_damage_is_found_and_named(tmp_path: Path):
    write(tmp_path, 1, "some content")
    path = tmp_path / "step_00000001"
    told = files.expected(path)
    assert list(told) == ["data"] and files.damage(path, told, told) == ""
    (path / "data").write_text("some cont")
    assert files.damage(path, told, told) == "data has 9 bytes, 12 were written"
    (path / "data").write_text("some c0ntent")
    assert "data is not as it was written" in files.damage(path, told, told)
    (path / "data").unlink()
    assert files.damage(path, told, told) == "data: No such file or directory"
    (path / files.CHECKSUMS).write_text("{")
    with pytest.raises(ValueError):
        files.expected(path)


def test_which_are_kept(tmp_path: Path):
    for step in range(1, 10):
        partial = files.begin(tmp_path, step)
        files.commit(partial, tmp_path / f"step_{step:08d}", {})
        files.prune(tmp_path, 2, 4)
    assert [path.name[-1] for path in files.whole(tmp_path)] == ["4", "8", "9"]


def test_what_a_resumed_run_may_change():
    assert all(map(is_fixed, ("optim.lr", "objective.clip_low", "data.sources", "batch.minibatches", "run.seed",
                              "rollout.temperature", "rollout.max_lag", "model.path", "reward.terms", "moe.replay")))
    assert not any(map(is_fixed, ("parallel.tensor", "cluster.trainers", "rollout.slots", "rollout.engine",
                                  "checkpoint.keep", "pipeline.schedule", "batch.max_tokens", "optim.distributed")))


def test_a_killed_replacement_is_put_back_and_damage_set_aside(tmp_path: Path):
    write(tmp_path, 1, "one")
    (tmp_path / "step_00000001").rename(tmp_path / ".replaced_00000001")  # killed between the two renames
    files.recover(tmp_path)
    assert [path.name for path in files.whole(tmp_path)] == ["step_00000001"]
    write(tmp_path, 2, "two")
    files.set_aside(tmp_path / "step_00000002")
    write(tmp_path, 3, "three")  # what is set aside takes no place among those kept
    assert [path.name[-1] for path in files.whole(tmp_path)] == ["1", "3"]


def test_groups_come_back_as_they_were(tmp_path: Path):
    def prompt_at(position: int) -> Prompt:
        return Prompt(position, 1, position, "source", np.arange(3, dtype=np.int32), label=[1, "x"], text="t")

    first = Sample(prompt_at(7), 0, 123456789012345, np.array([4, 5], np.int32), np.array([-.5, -.25], np.float32),
                   "stop", "hello \u00e9", [("g:1", 0, 1), ("g:2", 1, 2)], 0.1 + 0.2, {"exact": 1.0})
    second = Sample(Prompt(7, 1, 7, "source", np.arange(9, dtype=np.int32)), 0, 5, np.zeros(0, np.int32),
                    np.zeros(0, np.float32), "length", part=1, trained=np.zeros(0, bool),
                    advantages=np.zeros(0, np.float32), experts=np.arange(12, dtype=np.uint16).reshape(2, 3, 2))
    first.text *= 100_000
    write_groups(tmp_path / "held", {5: Group(prompt_at(7), [first, second])})
    assert int.from_bytes((tmp_path / "held").read_bytes()[:8], "little") < 2000  # the format bounds its header
    assert read_positions(tmp_path / "held") == {5: 7}
    (number, group), = read_groups(tmp_path / "held", prompt_at).items()
    assert number == 5 and group.prompt.label == [1, "x"] and len(group.samples) == 2
    for ours, theirs in zip(group.samples, (first, second), strict=True):
        for name, value in vars(theirs).items():
            if name == "prompt":
                assert ours.prompt.token_ids.tolist() == value.token_ids.tolist()
            elif isinstance(value, np.ndarray):
                assert getattr(ours, name).dtype == value.dtype and np.array_equal(getattr(ours, name), value)
            else:
                assert getattr(ours, name) == value, name
