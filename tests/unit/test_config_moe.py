"""Rules on mixtures of experts: replay, balancing, the alarm, and what needs a GPU or a package."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from good_config import MODEL, good_tree, write_files

from megarl.config import moe
from megarl.config.check import check
from megarl.config.layout import Layout
from megarl.config.load import build

DENSE = {"model_type": "qwen3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    write_files(path)
    return path


def config(folder: Path, changes: dict[str, Any]) -> Any:
    tree = copy.deepcopy(good_tree(folder))
    for path, value in changes.items():
        *parents, last = path.split(".")
        at: Any = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return build(tree)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"moe.replay": "engine", "megatron.moe_router_fusion": True},
     "megatron.moe_router_fusion: the fused router chooses experts inside a kernel, where they cannot be replayed; "
     "leave it out, or set moe.replay: none"),
    ({"moe.replay": "old", "model.balance": {"form": "megatron"}},
     "model.balance.form: Megatron-core's balancing loss counts experts that it chooses anew, not those that are "
     "replayed; use global or none, or set moe.replay: none"),
    ({"model.balance": {"bias_rate": 0.001}},
     "model.balance.bias_rate: qwen3_moe checkpoints have no bias of experts (e_score_correction_bias): engines would "
     "route without it; set it to 0 and use the balancing loss (model.balance.form: global); glm4_moe models have one"),
    ({"moe.collapse": {"entropy": 0.5}},  # log 2 / log 4
     "moe.collapse.entropy: with 2 of 4 experts a token the entropy is never below 0.500; use a value between 0.500 "
     "and 1, or 0 for no alarm"),
    ({"moe.collapse": {"entropy": 0.8, "action": "raise"}, "model.balance": {"coefficient": 0.0}},
     "moe.collapse.action: raise multiplies model.balance.coefficient, which is not in use; set model.balance.form: "
     "global and a coefficient above 0, or choose another action"),
    ({"moe.collapse": {"entropy": 0.8, "action": "freeze"}, "moe.router_lr": 0.0},
     "moe.collapse.action: the routers are frozen from the start (moe.router_lr: 0); choose another action"),
    ({"megatron.moe_token_dispatcher_type": "flex"},
     "megatron.moe_token_dispatcher_type: the flex dispatcher needs a GPU, but cluster.device is cpu; leave it out"),
    ({"megatron.fp8": "hybrid"}, "megatron.fp8: FP8 needs a GPU, but cluster.device is cpu; leave it out"),
    ({"megatron.fp8": "e4m3", "cluster.device": "auto"},
     "megatron.fp8: FP8 is Transformer Engine's, but model.implementation is local; leave it out, or set "
     "model.implementation: auto"),
    ({"megatron.fp8_param": True},
     "megatron.fp8_param: weights kept in FP8 can be neither published nor exported in this version; leave it out: "
     "megatron.fp8 computes in FP8"),
])
def test_rules(folder: Path, changes: dict[str, Any], expected: str) -> None:
    assert [mistake.line() for mistake in check(config(folder, changes), environ={}).mistakes] == [expected]


@pytest.mark.parametrize("changes", [
    {"moe.replay": "engine"}, {"moe.replay": "old", "model.balance": {"form": "none"}},
    {"moe.collapse": {"entropy": 0.8, "action": "raise"}, "moe.router_lr": 0.1}])
def test_what_is_allowed(folder: Path, changes: dict[str, Any]) -> None:
    assert check(config(folder, changes), environ={}).mistakes == []


def test_a_dense_model_has_none_of_it(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL, **DENSE}))
    changes = {"parallel.expert": 1, "moe.replay": "engine", "moe.router_lr": 0.5, "moe.collapse": {"entropy": 0.8},
               "model.balance": {"bias_rate": 0.1}}
    told = [mistake.line() for mistake in check(config(tmp_path, changes), environ={}).mistakes]
    assert told == [f"{key}: the model has no experts; leave it out" for key in (
        "moe.replay", "moe.router_lr", "moe.collapse", "model.balance.bias_rate")]


def test_a_bias_where_the_family_has_one(tmp_path: Path) -> None:
    write_files(tmp_path)
    glm = {"model_type": "glm4_moe", "n_routed_experts": 4, "first_k_dense_replace": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL, **glm}))
    assert check(config(tmp_path, {"model.balance": {"bias_rate": 0.1}}), environ={}).mistakes == []


def test_packages_are_looked_for_where_the_trainers_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flex, fp8 = ({"megatron.moe_token_dispatcher_type": "flex"}, {"megatron.fp8": "hybrid"})

    def told(changes: dict[str, Any], **where: bool) -> list[str]:
        return [mistake.line() for mistake in moe.check_packages(config(folder, changes), **where)]

    assert told(flex, transformer_engine=True, accelerator=False) == [
        "megatron.moe_token_dispatcher_type: the flex dispatcher needs a GPU; leave it out on a CPU"]
    assert "needs the package deep_ep, which is not installed" in told(
        flex, transformer_engine=False, accelerator=True)[0]
    assert "FP8 needs Transformer Engine's layers" in told(fp8, transformer_engine=False, accelerator=True)[0]
    assert told(fp8, transformer_engine=True, accelerator=True) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert told(flex, transformer_engine=False, accelerator=True) == []
    assert told({}, transformer_engine=False, accelerator=False) == []


def test_packs_for_fp8(folder: Path) -> None:
    """Each rank's share of a pack, and of sequence parallelism's, is a whole number of blocks of 32 tokens."""
    layout = Layout.from_config(config(folder, {"megatron.fp8": "hybrid", "cluster.trainers": 8, "parallel.tensor": 2,
                                                "parallel.context": 2}))
    assert layout.pack_multiple == 2 * 2 * 32 and layout.sequence_multiple == 4
    assert Layout.from_config(config(folder, {})).pack_multiple == 1
