"""Changed weights at the embedded engine: all of them against the version it holds, or it does not serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import save_hf_model

from megarl.model.hf_config import HFConfig
from megarl.rollout.embedded.updates import UpdateRefused, WeightUpdater
from megarl.rollout.embedded.weights import Weights
from megarl.sync import delta

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_hf_model("qwen3_moe", tmp_path_factory.mktemp("model"))


class Side:
    """An engine's weights, and a trainer's copy of them as they should become."""

    def __init__(self, model: Path) -> None:
        self.weights = Weights(HFConfig.read(model), torch.float32)
        self.weights.load_checkpoint(model)
        self.updater = WeightUpdater(self.weights, 1.0)
        self.old = {name: view.clone(memory_format=torch.contiguous_format)
                    for name, view in self.weights.views.items()}
        self.new = {name: tensor.clone() for name, tensor in self.old.items()}
        for tensor in self.new.values():
            tensor.view(-1)[::9] *= 1.01

    def changes(self) -> list[delta.Change]:
        return [delta.compare(name, self.new[name], self.old[name]) for name in self.old]

    def send(self, changes: list[delta.Change], base: str | None, held: str = "g:1") -> None:
        for message in delta.messages(changes, base, 1 << 14):
            self.updater.patch(message, held)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(view, tensors[name]) for name, view in self.weights.views.items())


@pytest.fixture
def side(model) -> Side:
    return Side(model)


def test_changes_make_the_new_version(side):
    changes = side.changes()
    assert {change.kind for change in changes} == {"sparse"}
    side.updater.begin()
    assert not side.updater.serving
    side.send(changes, "g:1")
    assert not side.updater.serving
    side.updater.end()
    assert side.updater.serving and side.holds(side.new)
    layer = side.weights.layers[0]  # what is derived from loaded tensors follows
    assert torch.equal(layer.qk_norm_nd[0], side.new["model.layers.0.self_attn.q_norm.weight"])


def test_changes_against_another_version_are_refused_and_change_nothing(side):
    with pytest.raises(UpdateRefused, match="between begin"):
        side.send(side.changes(), "g:1")
    side.updater.begin()
    with pytest.raises(UpdateRefused, match="since g:1 does not fit g:2"):
        side.send(side.changes(), "g:1", held="g:2")
    side.updater.end()
    assert side.updater.serving and side.holds(side.old)


def test_a_tensor_that_does_not_come_or_comes_twice(side):
    changes = side.changes()
    side.updater.begin()
    side.send([change for change in changes if change.name != NORM], "g:1")
    with pytest.raises(UpdateRefused, match="came twice"):
        side.send(changes[:1], "g:1")
    with pytest.raises(UpdateRefused, match=f"1 of {len(changes)} tensors were not sent, among them {NORM}"):
        side.updater.end()
    assert not side.updater.serving
    side.updater.begin()  # the version's name is still g:1, but parts of it are gone
    with pytest.raises(UpdateRefused, match="of which parts were overwritten"):
        side.send(changes, "g:1")
    side.send([delta.whole(name, tensor) for name, tensor in side.new.items()], None)
    side.updater.end()
    assert side.updater.serving and side.holds(side.new)


def test_what_does_not_fit_is_refused(side):
    side.updater.begin()
    with pytest.raises(UpdateRefused, match="no tensor model.nothing.weight"):
        side.send([delta.whole("model.nothing.weight", torch.zeros(3))], None)
    assert not side.updater.torn
    old, new = side.old[NORM].bfloat16(), side.old[NORM].bfloat16()
    new[3] += 1.0
    change = delta.compare(NORM, new, old)
    assert change.kind == "sparse"
    with pytest.raises(UpdateRefused, match=f"{NORM} is held in float32, what changed is in bfloat16"):
        side.send([change], "g:1")
    assert side.holds(side.old)
