"""One GRPO step of megarl against one of TRL's GRPOTrainer: the same model, batch and two cores, in one run.

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0    # brings accelerate, datasets, transformers
    python tests/bench/grpo_step.py --trl-python trl/bin/python [--rounds 3] [--steps 12] [--tasks "dense,moe,mixed"]

A step is an experience: 32 prompts, 16 samples each, at temperature 1; exact-match reward; old log-probs; two
optimizer steps (minibatches) of 256 samples, token-level GRPO without KL, AdamW, fp32. Tasks:
    dense, moe   the sort task's warm-started Qwen3 of 4 layers and Qwen3-MoE of 8: answers of 4 to 6 tokens.
    mixed        a random Qwen3 of the dense one's shape, two of whose 64 words end a response: lengths from 1 to 128,
                 31 on average. Nothing is learnt (lr 1e-9); padding and waiting for the longest cost what they cost.

Sides take turns, a whole start each, `rounds` times; the first steps of each start are not counted:
    megarl       `megarl.launch`: 2 trainers, data parallel, and 1 rollout rank with the embedded engine(s); one thread
                 per process. Publishing the weights to the engines is in the step.
    TRL          its own generate() with KV cache, sdpa, no logging, saving or checkpointing of activations; a
                 micro-batch is a whole minibatch. As one process with two threads, and as two DDP processes (gloo) with
                 one thread each; the ratio is to the better of the two.
Printed are all medians in seconds per step, the ratio, and each side's last reward and response length: both train.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PROMPTS, SAMPLES, MINIBATCHES = 32, 16, 2
SKIP = 3  # steps of each start that warm up
AVERAGE = 3  # last steps of a run whose reward and length are told
TRL = {"TRL, 1 process x 2 threads": ([], 2), "TRL, 2 processes x 1 thread": (
    ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"], 1)}


@dataclass(frozen=True)
class Task:
    """A model with prompts, and how it is trained."""

    folder: Path
    tokens: int
    lr: float
    engines: int


@dataclass(frozen=True)
class Result:
    """What a run of one side gave: seconds of each counted step; of the last steps mean response length and reward."""

    seconds: list[float]
    length: float
    reward: float


def make_task(name: str, work: Path) -> Task:
    """Make the files of a task; those of an earlier run in `work` are used again."""
    from megarl.examples import warm_start

    folder = work / name
    if name != "mixed":
        options = warm_start.Options(layers=4, experts=0) if name == "dense" else warm_start.Options()
        warm_start.make(folder, options)
        return Task(folder, tokens=6, lr=3e-4, engines=1)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megarl.examples import sort_task

    (folder / "model").mkdir(parents=True, exist_ok=True)
    sort_task.write_prompts(folder / "train.jsonl", 8192, 0, held_out=False)
    sort_task.write_tokenizer(folder / "model")
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=[sort_task.EOS_ID, len(sort_task.VOCABULARY) - 1])
    import torch

    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    return Task(folder, tokens=128, lr=1e-9, engines=2)


def run_megarl(task: Task, steps: int, work: Path) -> Result:
    """One start of megarl."""
    import yaml

    run_dir = work / "megarl"
    config = {
        "run": {"dir": str(run_dir), "steps": steps},
        "cluster": {"trainers": 2, "rollouts": 1, "device": "cpu", "timeout_s": 300.0},
        "model": {"path": str(task.folder / "model"), "implementation": "local", "dtype": "fp32"},
        "data": {"sources": [{"path": str(task.folder / "train.jsonl"), "name": "sort"}], "max_prompt_tokens": 8,
                 "prompts_per_step": PROMPTS},
        "rollout": {"engine": "embedded", "engines_per_rank": task.engines, "samples_per_prompt": SAMPLES,
                    "max_response_tokens": task.tokens, "slots": PROMPTS * SAMPLES // task.engines},
        "reward": {"terms": [{"name": "exact"}], "workers": 1},
        "objective": {"algorithm": "grpo"},
        "batch": {"minibatches": MINIBATCHES, "max_tokens": 8192},
        "optim": {"lr": task.lr},
        "checkpoint": {"every": 0, "export": False}, "eval": {"before_start": False},
        "observe": {"tensorboard": False, "progress": False}}
    (work / "megarl.yaml").write_text(yaml.safe_dump(config))
    shutil.rmtree(run_dir, ignore_errors=True)
    finish([sys.executable, "-m", "megarl.launch", str(work / "megarl.yaml")], work / "megarl.log", threads=1)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows]
    last = rows[-AVERAGE:]
    return Result(gaps(times), *(statistics.mean(row[name] for row in last)
                                 for name in ("rollout/response_tokens", "reward/mean")))


def run_trl(side: str, python: str, task: Task, steps: int, work: Path) -> Result:
    """One start of TRL."""
    launcher, threads = TRL[side]
    out = work / "trl.json"
    out.unlink(missing_ok=True)
    (work / "trl_settings.json").write_text(json.dumps({
        "model": str(task.folder / "model"), "data": str(task.folder / "train.jsonl"), "prompts": PROMPTS,
        "samples": SAMPLES, "tokens": task.tokens, "minibatches": MINIBATCHES, "experiences": steps, "lr": task.lr,
        "experts_implementation": "grouped_mm", "average": AVERAGE, "out": str(out)}))
    script = Path(__file__).with_name("grpo_step_trl.py")
    finish([python, *launcher, str(script), str(work / "trl_settings.json")], work / "trl.log", threads)
    told = json.loads(out.read_text())
    return Result(gaps(told["times"]), told["length"], told["reward"])


def finish(command: list[str], log: Path, threads: int) -> None:
    """Run a command to its end; its output goes to `log`."""
    paths = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PATH": paths, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT) if command[0] == sys.executable else ""
    with log.open("w") as sink:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{log.read_text()[-2000:]}")


def gaps(times: list[float]) -> list[float]:
    """Seconds of each step after the first `SKIP`."""
    return [after - before for before, after in zip(times[SKIP - 1:-1], times[SKIP:], strict=True)]


def bench(name: str, task: Task, python: str, rounds: int, steps: int, work: Path) -> None:
    """Print a task's table."""
    sides = {"megarl": lambda: run_megarl(task, steps, work)}
    sides |= {side: lambda side=side: run_trl(side, python, task, steps, work) for side in TRL}
    results: dict[str, list[Result]] = {side: [] for side in sides}
    print(f"{name}: {PROMPTS} x {SAMPLES} samples of at most {task.tokens} tokens, {MINIBATCHES} optimizer steps",
          flush=True)
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            results[side].append(sides[side]())
            print(f"  round {number + 1}  {side:28s} {statistics.median(results[side][-1].seconds):7.3f} s   "
                  f"load {os.getloadavg()[0]:.1f}", flush=True)
    medians = {side: statistics.median(second for result in found for second in result.seconds)
               for side, found in results.items()}
    for side, found in results.items():
        every = [second for result in found for second in result.seconds]
        print(f"  {side:28s} median {medians[side]:7.3f} s  fastest {min(every):7.3f} s  ({len(every)} steps)  "
              f"reward {found[-1].reward:.2f}  response tokens {found[-1].length:.1f}")
    best = min((side for side in sides if side != "megarl"), key=medians.get)
    print(f"  {best} / megarl: {medians[best] / medians['megarl']:.2f}", flush=True)


def main() -> None:
    """All tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each side")
    parser.add_argument("--steps", type=int, default=12, help=f"per start; the first {SKIP} do not count")
    parser.add_argument("--tasks", default="dense,moe,mixed")
    parser.add_argument("--work", type=Path, help="folder for models and logs, kept; default: a temporary one")
    given = parser.parse_args()
    if given.steps < SKIP + AVERAGE:
        parser.error(f"--steps must be at least {SKIP + AVERAGE}")
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        for name in given.tasks.split(","):
            bench(name, make_task(name, work), os.path.abspath(given.trl_python), given.rounds, given.steps, work)


if __name__ == "__main__":
    main()
