"""Half a run at a time: what `debug` allows and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import Config
from megarl.errors import UserMistake


def check(config: Config, notes: list[str]) -> Iterator[UserMistake]:
    """Mistakes in the section `debug`; what may surprise goes to `notes`."""
    debug, ranks = config.debug, config.cluster.rollouts
    if debug.rollout_only and not (debug.dump_experience or config.observe.rollouts):
        notes.append("debug.rollout_only: only metrics will be written; debug.dump_experience or observe.rollouts "
                     "keep the samples")
    if not debug.replay_experience:
        return
    for name in ("dump_experience", "rollout_only"):
        if getattr(debug, name):
            yield UserMistake("nothing is sampled where experiences are replayed", f"debug.{name}",
                              "remove it, or debug.replay_experience")
    if ranks:
        yield UserMistake(f"{ranks} ranks for engines, but replayed experiences (debug.replay_experience) need none",
                          "cluster.rollouts", "use 0")
    if not Path(debug.replay_experience).is_dir():
        yield UserMistake(f"{debug.replay_experience} is not a directory", "debug.replay_experience",
                          "name the directory that debug.dump_experience had")
    if config.eval.sets and (config.eval.every or config.eval.before_start):
        notes.append("debug.replay_experience: nothing is evaluated, since that needs engines")
