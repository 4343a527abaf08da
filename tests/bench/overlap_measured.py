"""The overlap bench measured: the real loop with an engine that sleeps, against the simulator's forecast for it.

    python tests/bench/overlap_measured.py [--task runs/sort-task-dense] [--steps 40] [--lags 0 1 2] [--token-ms 40]

One trainer (a real one, a tiny model) and one engine by address, which speaks the protocol but sleeps where it would
compute: 32 slots, a fixed time per token, lengths of real requests cut by 20 (azure_conv: 1 to 50 tokens, mean 11). It
stands still while weights are swapped, then goes on (on_update: retract), and names the weights of every token.

Each line compares steps per hour, over the steps after the queues have filled, with what `rollout.overlap` forecasts
for the same lengths, slots, seconds of training and seconds in which the engine stood still (both as measured), and
with the bound. At the end: Kolmogorov-Smirnov distance of the lengths trained on to those sampled, and groups that were
sampled and never trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/bench")]

from overlap import generated_tokens  # noqa: E402
from scripted_engine import ScriptedEngine, Serving  # noqa: E402

from megarl.data.dump import joined, read_parts  # noqa: E402
from megarl.data.sample import sample_seed  # noqa: E402
from megarl.rollout.overlap import Setting, ks_distance, simulate  # noqa: E402

GROUPS, SAMPLES, SLOTS, MOST = 16, 4, 32, 50
LENGTHS = np.maximum(generated_tokens() // 20, 1)


def length_of(seed: int) -> int:
    """Tokens of the answer with this seed."""
    return int(LENGTHS[np.random.default_rng(seed).integers(len(LENGTHS))])


class SleepingEngine(ScriptedEngine):
    """Slots, a queue and a clock that stands still while generation is paused."""

    def __init__(self, token_s: float) -> None:
        super().__init__("own")
        self.token_s = token_s
        self.slots, self.goes = asyncio.Semaphore(SLOTS), asyncio.Event()
        self.goes.set()
        self.stood, self.since = 0.0, 0.0
        self.pauses: list[float] = []
        self.named: list[tuple[float, str]] = []  # (clock, version from then on)

    def now(self) -> float:
        """Seconds of generation."""
        return (asyncio.get_running_loop().time() if self.goes.is_set() else self.since) - self.stood

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        return web.json_response(await asyncio.gather(
            *(self.answer(body, seed) for seed in body["sampling_params"]["sampling_seed"])))

    async def answer(self, body: dict, seed: int) -> dict:
        """One sample, in its own time."""
        count = length_of(seed)
        async with self.slots:
            begun = self.now()
            while (left := begun + count * self.token_s - self.now()) > 0:
                await self.goes.wait()
                await asyncio.sleep(left)
            spans = self.spans(begun, count)
        ids = np.random.default_rng(seed).integers(3, 13, count).tolist()
        return {"text": "", "output_ids": ids, "meta_info": {
            "id": body["rid"], "finish_reason": {"type": "length" if count == MOST else "stop"},
            "prompt_tokens": len(body["input_ids"]), "completion_tokens": count, "cached_tokens": 0,
            "weight_version": self.version, "weight_versions": spans,
            "output_token_logprobs": [[-2.5, token, None] for token in ids]}}

    def spans(self, begun: float, count: int) -> list[dict]:
        """Which weights made which tokens."""
        edges = [min(max(int(np.ceil((clock - begun) / self.token_s - 1e-9)), 0), count) for clock, _ in self.named]
        ends = [*edges[1:], count]
        return [{"version": version, "start": start, "end": end}
                for (_, version), start, end in zip(self.named, edges, ends, strict=True) if end > start]

    async def pause(self, request: web.Request) -> web.Response:
        """POST /pause_generation."""
        self.since = asyncio.get_running_loop().time()
        self.goes.clear()
        return web.json_response({"success": True})

    async def note_call(self, request: web.Request) -> web.Response:
        if request.path == "/continue_generation" and not self.goes.is_set():
            self.pauses.append(asyncio.get_running_loop().time() - self.since)
            self.stood += self.pauses[-1]
            self.goes.set()
        return await super().note_call(request)

    async def set_version(self, request: web.Request) -> web.Response:
        answer = await super().set_version(request)
        self.named.append((self.now(), self.version))
        return answer

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.post("/pause_generation", self.pause),
                        *(web.post(path, self.note_call) for path in (
                            "/begin_weight_update", "/update_weights_from_disk", "/flush_cache"))])
        return app


def run(folder: Path, task: Path, steps: int, lag: int, url: str) -> list[dict]:
    """The real loop; the records of its steps."""
    command = [
        sys.executable, "-m", "megarl.train", str(ROOT / "configs/tiny/grpo_dense.yaml"), f"run.dir={folder}",
        f"run.steps={steps}", "cluster.trainers=1", "cluster.rollouts=0", "parallel.tensor=1", f"rollout.urls=[{url}]",
        f"rollout.max_lag={lag}", f"rollout.max_response_tokens={MOST}", f"rollout.samples_per_prompt={SAMPLES}",
        f"data.prompts_per_step={GROUPS}", f"model.path={task}/model", f"data.sources.0.path={task}/train.jsonl",
        f"eval.sets.0.path={task}/heldout.jsonl", "eval.every=0", "eval.before_start=false", "checkpoint.every=0",
        "checkpoint.export=false", "sync.transport=disk", "objective.gap_alarm.action=off", "observe.tensorboard=false",
        f"debug.dump_experience={folder}/experience", "rollout.groups_in_flight=1000", "batch.minibatches=1"]
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **alone, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"max_lag {lag} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(engine: SleepingEngine, records: list[dict], folder: Path, lag: int) -> str:
    """One line of the table."""
    steps, period, skip = len(records), lag + 1, lag + 2
    last = skip + (steps - 1 - 2 * skip) // period * period
    spans = np.diff([record["time"] for record in records[skip:last + 1]])
    waits = [record["seconds/rollout"] for record in records[skip + 1:last + 1]]
    busy = float(spans.mean()) - statistics.fmean(waits)
    stood = statistics.fmean(engine.pauses[-steps // 2:])
    lengths = np.array([[length_of(sample_seed(0, position, n)) for n in range(SAMPLES)]
                        for position in range(steps * GROUPS)])
    setting = Setting(SLOTS, engine.token_s, GROUPS, busy - stood, stood, lag, steps)
    forecast = simulate(setting, lengths)
    got, want = 3600 / float(spans.mean()), forecast.steps_per_hour(skip)
    bound = setting.bound(lengths[skip * GROUPS:-skip * GROUPS])
    trained = np.concatenate([joined(read_parts(folder, step, 0, 1)).response_lengths for step in range(1, steps + 1)])
    seeds = [seed for body in engine.requests for seed in body["sampling_params"]["sampling_seed"]]
    sampled = np.array([length_of(seed) for seed in seeds])
    mean_lag = statistics.fmean(record.get("lag/mean", 0.0) for record in records[skip:])
    return (f"| {lag} | {got:.0f} | {want:.0f} | {100 * got / want:.1f} % | {bound:.0f} | {100 * got / bound:.0f} % | "
            f"{busy:.2f} | {1000 * stood:.0f} | {mean_lag:.2f} | {ks_distance(trained, sampled):.4f} | "
            f"{(len(sampled) - len(trained)) // SAMPLES} |")


def main() -> None:
    """Run each lag, print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, default=ROOT / "runs/sort-task-dense")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--token-ms", type=float, default=40.0)
    options = parser.parse_args()
    work = GROUPS * SAMPLES * LENGTHS.mean() * options.token_ms / 1000 / SLOTS
    print(f"{GROUPS} prompts x {SAMPLES} samples, {SLOTS} slots, {options.token_ms:g} ms a token: sampling a step "
          f"takes {work:.2f} s with every slot busy\n")
    print("| max_lag | steps/h | forecast | of it | bound | of it | training, s | stood still, ms | mean lag | KS | "
          "not trained on |\n|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for lag in options.lags:
            folder = Path(place) / f"lag{lag}"
            engine = SleepingEngine(options.token_ms / 1000)
            with Serving(engine) as served:
                records = run(folder, options.task.absolute(), options.steps, lag, served.url)
            print(compare(engine, records, folder / "experience", lag), flush=True)


if __name__ == "__main__":
    main()
