"""The copy beside an engine: its files hold exactly one version, or it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import save_hf_model
from safetensors.torch import load_file

from megarl.rollout.relay.files import Copy, CopyRefused
from megarl.sync import delta

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_hf_model("qwen3_moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture
def old(model) -> dict[str, torch.Tensor]:
    """Weights in bf16, one of them in fp32."""
    found = load_file(model / "model.safetensors")
    return found | {NORM: found[NORM].float()}


@pytest.fixture
def new(old) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in changed.values():
        tensor.view(-1)[::9] *= 1.5
    return changed


def update(copy: Copy, changes: list[delta.Change], base: str | None, version: str) -> None:
    copy.begin()
    for message in delta.messages(changes, base, 1 << 14):
        copy.patch(message)
    copy.end()
    copy.version = version


def on_disk(copy: Copy) -> dict[str, torch.Tensor]:
    """As an engine reads it, through the index."""
    index = json.loads((copy.directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(copy.directory / name) for name in set(index["weight_map"].values())}
    assert {name for file in files.values() for name in file} == set(index["weight_map"])
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items())


def whole(tensors: dict[str, torch.Tensor]) -> list[delta.Change]:
    return [delta.whole(name, tensor) for name, tensor in tensors.items()]


def compared(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> list[delta.Change]:
    return [delta.compare(name, new[name], old[name]) for name in old]


def test_its_files_are_the_version(model, tmp_path, old, new):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "left").touch()
    copy = Copy(tmp_path / "copy", model)
    assert not (copy.directory / "left").exists() and (copy.directory / "config.json").exists() and not copy.version
    update(copy, whole(old), None, "g:1")
    files = sorted(copy.directory.glob("*.safetensors"))
    assert same(on_disk(copy), old) and len(files) > 3
    update(copy, compared(new, old), "g:1", "g:2")
    assert same(on_disk(copy), new) and sorted(copy.directory.glob("*.safetensors")) == files
    update(copy, whole(old), None, "g:3")  # in place too
    assert same(on_disk(copy), old) and sorted(copy.directory.glob("*.safetensors")) == files


def test_what_it_refuses(model, tmp_path, old, new):
    copy = Copy(tmp_path / "copy", model)
    changes = compared(new, old)
    (message,) = delta.messages(changes, "g:1", 1 << 30)
    with pytest.raises(CopyRefused, match="between begin"):
        copy.patch(message)
    copy.begin()
    with pytest.raises(CopyRefused, match="already open"):
        copy.begin()
    with pytest.raises(CopyRefused, match="since g:1 does not fit nothing"):
        copy.patch(message)
    (everything,) = delta.messages(whole(old), None, 1 << 30)
    copy.patch(everything)
    with pytest.raises(CopyRefused, match="came twice"):
        copy.patch(everything)
    copy.end()
    copy.version = "g:1"

    copy.begin()
    (some,) = delta.messages(changes[1:], "g:1", 1 << 30)
    copy.patch(some)
    with pytest.raises(CopyRefused, match=f"1 of {len(old)} tensors were not sent, among them {changes[0].name}"):
        copy.end()
    assert copy.version == ""  # parts of two versions
    copy.begin()
    copy.version = "g:1"
    with pytest.raises(CopyRefused, match="of which parts were overwritten"):
        copy.patch(message)
    (everything,) = delta.messages(whole(new), None, 1 << 30)
    copy.patch(everything)
    copy.end()
    assert same(on_disk(copy), new)
