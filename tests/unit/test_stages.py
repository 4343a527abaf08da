"""Which layers each stage has: lists that are given, and balanced ones against every possible cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import models
import pytest

from megarl.config.layout import Layout
from megarl.config.stages import Part, balanced, head_in_layers, parts
from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.pipeline.schedule import placement


def hf_of(folder: Path, **changes: object) -> HFConfig:
    models.hf_config("qwen3_moe", **changes).save_pretrained(folder)
    return HFConfig.read(folder)


@pytest.mark.parametrize("name,ranks,chunks", [("looped", 2, 1), ("looped", 3, 1), ("looped", 2, 2), ("v", 2, 2),
                                               ("mirrored", 4, 2)])
@pytest.mark.parametrize("head", [0.0, 0.4, 2.5, 30.0])
def test_no_cut_keeps_the_busiest_rank_shorter(name: str, ranks: int, chunks: int, head: float):
    table, layers = placement(name, ranks, chunks), 9
    first = [min(holders) for holders in table]

    def busiest(counts: tuple[int, ...]) -> float:
        load = dict.fromkeys(first, 0.0)
        for stage, count in enumerate(counts):
            load[first[stage]] += count + head * (stage == len(table) - 1)
        return max(load.values())

    cuts = [cut for cut in itertools.product(range(1, layers + 1), repeat=len(table)) if sum(cut) == layers]
    ours = balanced(layers, table, head)
    assert sum(ours) == layers and min(ours) >= 1
    assert busiest(tuple(ours)) == min(map(busiest, cuts))


def test_hand_worked_cuts():
    assert balanced(8, placement("looped", 4), 0.01) == [2, 2, 2, 2]
    assert balanced(48, placement("looped", 4), 5.5) == [13, 13, 14, 8]  # 53.5 layers' work on 4 ranks
    assert balanced(8, placement("v", 2), 2.0) == [2, 2, 3, 1]  # rank 0: 2 + 1 + head 2, rank 1: 2 + 3


def test_the_head_in_layers(tmp_path: Path):
    hf = hf_of(tmp_path)  # hidden 32, 4 heads and 2 key/value heads of 16, 2 of 8 experts of 24, 99 words
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 2 * 3 * 32 * 24
    assert head_in_layers(hf) == pytest.approx(4 / 3 * 99 * 32 / layer)


def test_parts_and_mistakes(tmp_path: Path):
    hf = hf_of(tmp_path, num_hidden_layers=5)
    layout = Layout(2, pipeline=2, placement="v", chunks=2)
    assert [part.layers for part in parts(hf, layout, [1, 2, 1, 1])] == [1, 2, 1, 1]
    assert parts(hf, layout, [1, 2, 1, 1])[2] == Part(2, 4, 3, 1)
    assert [part.is_first for part in parts(hf, layout)] == [True, False, False, False]
    assert [part.is_last for part in parts(hf, layout)] == [False, False, False, True]
    with pytest.raises(UserMistake, match="4 ranks with 2 stages each need 8 layers, the model has 5"):
        parts(hf, Layout(4, pipeline=4, placement="v", chunks=2))
    for wrong in ([1, 2, 1], [1, 2, 1, 2]):
        with pytest.raises(UserMistake, match="4 stages, the model 5 layers"):
            parts(hf, layout, wrong)
    with pytest.raises(UserMistake, match="3 is odd"):
        Layout(3, pipeline=3, placement="mirrored", chunks=2)
