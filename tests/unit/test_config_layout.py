"""Degrees: what follows from them, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from good_config import good_tree, write_files

from megarl.config.layout import Layout, check_model
from megarl.config.load import build
from megarl.config.schema import Config
from megarl.errors import UserMistake

BASE = {"model": {"path": "m"}, "data": {"sources": [{"path": "a"}]}, "reward": {"terms": [{"name": "exact"}]}}


def test_what_follows_from_the_degrees() -> None:
    layout = Layout(world=16, tensor=2, pipeline=2, context=2, expert=4, sequence=True)
    assert (layout.data, layout.expert_data) == (2, 2)  # 16 / (2*2*2), 16 / (2 stages * 4)
    # each sequence into 2*2 zig-zag chunks; each rank's share of the pack (1/2) again into 2 for sequence parallel
    assert (layout.sequence_multiple, layout.pack_multiple) == (4, 4)
    assert Layout(world=6, tensor=3, context=2, sequence=True).pack_multiple == 12  # lcm(2*3, 4)
    assert (Layout(world=1).sequence_multiple, Layout(world=1).pack_multiple) == (1, 1)
    assert layout.describe() == "TP2+SP PP2 CP2 EP4 ETP1 DP2 (16 ranks)"


@pytest.mark.parametrize(("tensor", "given", "expected"), [(2, "auto", True), (1, "auto", False), (2, False, False)])
def test_sequence_parallelism_follows_tensor_unless_said(tensor: int, given: bool | str, expected: bool) -> None:
    config = build(BASE | {"cluster": {"trainers": 4}, "parallel": {"tensor": tensor, "sequence": given}})
    assert Layout.from_config(config) == Layout(world=4, tensor=tensor, sequence=expected)


@pytest.mark.parametrize(("degrees", "model", "told"), [
    ({"expert": 2}, {}, "parallel.expert: 2 with a dense model; set it to 1"),
    ({"expert_tensor": 2}, {}, "parallel.expert_tensor: 2 with a dense model; set it to 1"),
    ({"tensor": 4}, {"ffn": 6}, "parallel.tensor: 4 does not divide the model's 6 FFN columns; use one of [1, 2, 3]"),
    ({"tensor": 8, "world": 8}, {},
     "parallel.tensor: 8 does not divide the model's 4 key/value heads; use one of [1, 2, 4]"),
    ({"expert_tensor": 4}, {"experts": 4, "ffn": 6},
     "parallel.expert_tensor: 4 does not divide the model's 6 expert FFN columns; use one of [1, 2, 3]"),
])
def test_a_model_that_cannot_be_cut(degrees: dict[str, int], model: dict[str, int], told: str) -> None:
    with pytest.raises(UserMistake) as caught:
        check_model(Layout(**({"world": 4} | degrees)), **({"kv_heads": 4, "ffn": 8} | model))
    assert caught.value.line() == told


def test_zero_is_no_degree() -> None:
    with pytest.raises(UserMistake, match="parallel.context: 0 is not a degree"):
        Layout(world=1, context=0)


@pytest.mark.parametrize(("schedule", "layers", "expected"), [
    ("1f1b", 8, ("looped", 1)), ("interleaved", 8, ("looped", 3)), ("zb-v", 8, ("v", 2)),
    ("dualpipev", 8, ("v", 2)), ("dualpipe", 8, ("mirrored", 2)),
    ("auto", 8, ("v", 2)),  # ZB-V's bubble is the least where pairs hide nothing
    ("auto", 3, ("looped", 1)),  # a V of two ranks needs four layers
])
def test_where_a_schedule_puts_the_stages(schedule: str, layers: int, expected: tuple[str, int],
                                          tmp_path: Path) -> None:
    tree = good_tree(tmp_path)
    write_files(tmp_path, layers=layers)
    tree["parallel"], tree["batch"]["max_tokens"] = {"pipeline": 2}, 24  # 96 tokens are expected, 4 micro-batches
    tree["pipeline"] = {"schedule": schedule, "chunks": 3}
    layout = Layout.from_config(Config.model_validate(tree))
    assert (layout.placement, layout.chunks) == expected
    assert layout.stages == 2 * layout.chunks / layout.mirrors
