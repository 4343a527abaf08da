"""Samples reach the ranks that train them: compared with the samples themselves, on layouts of four ranks."""

from __future__ import annotations

import datetime

import numpy as np
from worlds import run_world

from megarl.config.layout import Layout
from megarl.data.sample import Group, Prompt, Sample

LAYOUTS = [Layout(4), Layout(4, tensor=2), Layout(4, pipeline=2), Layout(4, tensor=2, pipeline=2),
           Layout(4, context=2)]


def _groups(count: int) -> list[Group]:
    """Groups of three samples whose tokens, log-probs and rewards tell where they belong."""
    made = []
    for position in range(100, 100 + count):
        prompt = Prompt(position, 0, position, "test", np.arange(2 + position % 3, dtype=np.int32) + position)
        samples = [Sample(prompt, n, 0, np.full(1 + (position + n) % 4, 1000 * n + position, np.int32),
                          np.full(1 + (position + n) % 4, -position - n / 8, np.float32),
                          "length" if n == 1 else "stop", reward=position + n / 4, part=n // 2,
                          versions=[("g:5", 0, 1), (f"g:{position}", 1, 4)],
                          trained=np.arange(1 + (position + n) % 4) != 2 * n) for n in range(3)]
        for sample in samples:
            rows = 0 if sample.n == 2 else sample.length - 1
            chosen = np.arange(rows * 6) % 97 + 256 * sample.n + position
            sample.experts = chosen.astype(np.uint16).reshape(rows, 3, 2)
        made.append(Group(prompt, samples))
    return made


def _move(rank: int) -> list[str]:
    from megatron.core import parallel_state

    from megarl.cluster.groups import make_groups
    from megarl.data.exchange import exchange, gather_table
    from megarl.data.ragged import SampleBatch
    from megarl.data.routing import RoutingShape

    wrong = []
    everything = _groups(7)
    for layout in LAYOUTS:
        groups = make_groups(layout, datetime.timedelta(seconds=60), seed=1)
        # the last leader sampled nothing, the others share the groups in an order of their own
        share = [g for i, g in enumerate(reversed(everything)) if i % max(layout.data - 1, 1) == groups.dp]
        local = SampleBatch.from_groups(share) if groups.is_leader else None
        table = gather_table(local, groups)
        identity = [(p, n) for p in range(100, 107) for n in range(3)]
        if list(zip(table.position.tolist(), table.n.tolist(), strict=True)) != identity:
            wrong.append(f"{layout}: table {table.position} {table.n}")
        truth = SampleBatch.from_groups(everything)
        if table.part.tolist() != truth.part.tolist() or table.trained_tokens.tolist() != [
                sum(s.trained) for g in everything for s in g.samples]:
            wrong.append(f"{layout}: parts {table.part}, trained {table.trained_tokens}")
        target = np.array([(3 * i + i // 5) % layout.data for i in range(len(table))])
        target[4] = -1
        samples, numbers = exchange(local, table, target, groups, RoutingShape(4, (1, 2, 3), 1000, 2))
        if numbers.tolist() != np.flatnonzero(target == groups.dp).tolist():
            wrong.append(f"{layout}: numbers {numbers}")
        truth = truth.select(numbers)
        for name in ("position", "n", "prompt_lengths", "response_lengths", "tokens", "logprobs", "rewards",
                     "truncated", "part", "versions", "experts"):
            if not np.array_equal(getattr(samples, name), getattr(truth, name)):
                wrong.append(f"{layout}: {name} {getattr(samples, name)}")
        if exchange(local, table, target, groups)[0].experts is not None:
            wrong.append(f"{layout}: experts were moved although nobody asked")
        parallel_state.destroy_model_parallel()
    return wrong


def test_every_sample_arrives_once_and_whole():
    assert run_world(4, _move) == [[]] * 4
