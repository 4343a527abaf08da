"""What a checkpoint says of the sampling is what there is of it."""

from __future__ import annotations

from types import SimpleNamespace

from megarl.checkpoint.state import Progress
from megarl.trainer import Trainer


def test_a_run_without_engines_claims_no_held_groups():
    """It may have resumed from a checkpoint that holds some, of which it writes nothing."""
    saved = []
    state = SimpleNamespace(state=dict)
    trainer = SimpleNamespace(
        progress=Progress(3, 30, held=(1, 2)), policy=SimpleNamespace(pace=state, collapse=state), guard=state,
        source=SimpleNamespace(course=None), config=SimpleNamespace(checkpoint=SimpleNamespace(background=True)),
        checkpoints=SimpleNamespace(save=lambda progress, more: saved.append((progress, more(None)))))
    Trainer.save(trainer)
    assert saved == [(Progress(3, 30), [])]
