"""Runs of the tiny MoE job in which a random process is killed at a random moment, and started again until they end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from good_config import good_tree, write_files, write_tree

from megarl.errors import EXIT_FAULT

ROOT = Path(__file__).resolve().parent.parent
STEPS, PROMPTS, SAMPLES = 5, 6, 4
VICTIMS = ("trainer 0", "trainer 1", "rollout", "engine")
PHASES = ("rollout", "logprobs", "update", "publish", "checkpoint", "evaluate")


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when: so long after the run has entered a phase of a step.

    Attributes:
        victim: of VICTIMS.
        step: finished steps; the phase is entered with these.
        phase: of PHASES.
        delay_s: after that.
    """

    victim: str
    step: int
    phase: str
    delay_s: float

    @classmethod
    def draw(cls, seed: int) -> Kill:
        """The kill of a seed."""
        chance = random.Random(seed)
        victim, step, phase = chance.choice(VICTIMS), chance.randrange(1, STEPS - 1), chance.choice(PHASES)
        if phase == "evaluate":  # of the steps that end in one, see `tree`
            step = chance.choice((1, 3))
        return cls(victim, step, phase, chance.choice((0.0, 0.01, 0.05, 0.2)))


def tree(folder: Path, run: str, lag: int) -> dict[str, Any]:
    """The job: a checkpoint after every step, a held-out set, everything recorded."""
    tree = good_tree(folder)
    tree["run"] = {"dir": str(folder / run), "steps": STEPS, "seed": 3}
    tree["data"] |= {"prompts_per_step": PROMPTS}
    tree["cluster"] |= {"lease_timeout_s": 10.0, "timeout_s": 60.0}
    tree["rollout"] |= {"samples_per_prompt": SAMPLES, "max_response_tokens": 32, "slots": 8, "max_lag": lag,
                        "no_engine_timeout_s": 60.0, "retries": 20}
    tree["reward"] = {"terms": [{"name": "length", "options": {"soft": 8, "hard": 32}}], "workers": 1}
    tree["batch"] = {"minibatches": 2, "max_tokens": 1024}
    tree["optim"] = {"lr": 3e-3, "warmup_steps": 4}
    tree["checkpoint"] = {"every": 1, "keep": STEPS}
    tree["observe"] = {"rollouts": 1}
    tree["eval"] = {"every": 2, "before_start": False, "sets": [{"path": str(folder / "heldout.jsonl"), "name": "h"}]}
    return tree


def prepare(folder: Path) -> None:
    """Model and data."""
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder)


def run(folder: Path, name: str, lag: int = 0, kill: Kill | None = None, lives: int = 4) -> list[int]:
    """Run to the end, through as many lives as it takes; the exit status of each.

    Raises:
        AssertionError: a life ended otherwise than by its end or as a fault, or the kill's moment never came.
    """
    statuses: list[int] = []
    hit = kill is None
    while not statuses or statuses[-1]:
        assert len(statuses) < lives, f"{kill}: not done after lives that ended with {statuses}"
        (folder / name / "exit.json").unlink(missing_ok=True)  # as the launch scripts do
        process = subprocess.Popen(
            ["bash", str(ROOT / "launch" / "torchrun.sh"), str(write_tree(folder, tree(folder, name, lag)))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "MEGARL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"})
        hit = hit or _strike(process, folder / name, kill)
        told, _ = process.communicate(timeout=300)
        statuses.append(process.returncode)
        assert process.returncode in (0, EXIT_FAULT), f"{kill}: {told}"
    assert hit, f"{kill}: its moment never came"
    return statuses


def _strike(process: subprocess.Popen, run_dir: Path, kill: Kill) -> bool:
    """Wait for the moment and kill; whether it came before the end of the life."""
    while process.poll() is None:
        if _now(run_dir) == (kill.step, kill.phase):
            time.sleep(kill.delay_s)
            victims = _processes(run_dir, kill.victim)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            return bool(victims)
        time.sleep(0.002)
    return False


def _now(run_dir: Path) -> tuple[int, str] | None:
    try:
        told = json.loads((run_dir / "heartbeat.json").read_text())
        return told["step"], told["phase"]
    except (OSError, ValueError):
        return None


def _processes(run_dir: Path, victim: str) -> list[int]:
    """Process ids of a victim of the run in `run_dir`, found by command line and environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().split(b"\0")
            environment = dict(pair.split(b"=", 1) for pair in (place / "environ").read_bytes().split(b"\0")
                               if b"=" in pair)
        except OSError:
            continue
        rank = {"trainer 0": b"0", "trainer 1": b"1", "rollout": b"2"}.get(victim)
        if victim == "engine":
            if b"megarl.rollout.embedded" in command and environment.get(b"PWD") and _belongs(place, run_dir):
                found.append(int(place.name))
        elif b"megarl.train" in command and environment.get(b"RANK") == rank and environment.get(
                b"MEGARL_RUN_DIR") == str(run_dir).encode():
            found.append(int(place.name))
    return found


def _belongs(place: Path, run_dir: Path) -> bool:
    """Whether an engine logs into the run's directory."""
    return os.readlink(place / "fd" / "1").startswith(str(run_dir))


def samples(folder: Path, name: str) -> list[dict[str, Any]]:
    """All samples that the run was trained on, in order of step, position and number."""
    lines = [json.loads(line) for path in (folder / name / "rollouts").glob("step_*")
             for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["step"], line["position"], line["n"]))


def differences(folder: Path, name: str, other: str) -> list[str]:
    """What is not equal to the bit at the end of two runs: samples, exported weights, the last checkpoint's tensors."""
    wrong = []
    kept = ("step", "position", "n", "response_ids", "logprobs", "reward", "seed", "epoch")
    ours, theirs = ([{key: line[key] for key in kept} for line in samples(folder, run)] for run in (name, other))
    if ours != theirs:
        wrong.append(f"samples: {sum(a != b for a, b in zip(ours, theirs, strict=False))} of {len(theirs)} differ")
    tensors, others = (_tensors(folder / run / "checkpoints" / f"step_{STEPS:08d}") for run in (name, other))
    unequal = [key for key in others if key not in tensors or not tensors[key].equal(others[key])]
    if unequal or tensors.keys() != others.keys():
        wrong.append(f"checkpoint: {len(unequal)} of {len(others)} tensors differ, {unequal[:3]}")
    from safetensors.torch import load_file

    for path in sorted((folder / other / "export").glob("*.safetensors")):
        here, there = load_file(folder / name / "export" / path.name), load_file(path)
        if here.keys() != there.keys() or not all(here[key].equal(there[key]) for key in there):
            wrong.append(f"export: {path.name} differs")
    return wrong


def _tensors(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint: weights, masters, moments."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(path)
    found = {key: torch.empty(one.size, dtype=one.properties.dtype)
             for key, one in reader.read_metadata().state_dict_metadata.items()
             if isinstance(one, TensorStorageMetadata)}
    load(found, storage_reader=reader, no_dist=True)
    return found
