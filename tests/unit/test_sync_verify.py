"""Engines whose tensors have no names in common with the trainers': they are held against each other."""

from __future__ import annotations

import pytest

from megarl.rollout.client import EngineTimeout
from megarl.rollout.fleet import EngineRecord
from megarl.sync.crew import Targets
from megarl.sync.sets import EngineSet
from megarl.sync.verify import against_each_other


class OneTrainer:
    """A crew of one, whose engines answer what the test says."""

    is_zero, call_timeout_s = True, 1.0

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def ask(self, engines, call, wait_s):
        late = {engine.id: EngineTimeout(f"{engine.url}/: late") for engine in engines}
        return [late[engine.id] if self.answers[engine.id] == "late" else self.answers[engine.id] for engine in engines]

    def per_set(self, targets, work):
        failed = {}
        work(failed)
        targets.failed.update(failed)


@pytest.mark.parametrize(("answers", "expected", "failed", "agreed"), [
    ("aaa", "", [], "a"), ("aab", "", [3], "a"), ("baa", "", [1], "a"), ("ab", "", [1, 2], ""),
    ("abc", "", [1, 2, 3], ""), ("a", "", [], "a"), ("a", "b", [1], "b"), ("bb", "a", [1, 2], "a"),
    (["a", "a", "late"], "", [3], "a"),
    (["late"], "", [1], "")])
def test_the_minority_is_wrong_or_all_are(answers, expected, failed, agreed):
    engines = [EngineRecord(f"{number}", 1, f"http://{number}", "up") for number in range(1, 1 + len(answers))]
    targets = Targets([EngineSet(number, (engine,)) for number, engine in enumerate(engines, 1)], {})
    crew = OneTrainer(dict(zip("123", answers, strict=False)))
    assert against_each_other(crew, targets, expected) == agreed
    assert sorted(targets.failed) == failed
    assert all(f"http://{number}" in why for number, why in targets.failed.items())
