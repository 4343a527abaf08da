"""What routing replay is worth: the gap between an engine's log-probs and the trainer's, with replay and without.

    python tests/bench/replay.py [--engine embedded|sglang] [--sglang-python .../bin/python] [--prompts 48]

A random Qwen3-MoE (6 layers, 32 experts, 4 a token) is served by a real engine process over HTTP; groups of 4 samples
of up to 48 tokens are drawn at temperature 1 through megarl's client. A policy with the same weights then computes old
log-probs on one rank, its experts chosen freely (none), or as the engine's (engine). Both sides in one dtype: bf16,
where two implementations round differently and near-ties of the router turn over, and fp32.

Of the response tokens: mean and largest |old - engine| log-prob, the share above 0.1, the k3 estimate of the KL
divergence; and the share of (token, layer) whose router would have taken another set of experts than the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

from models import save_hf_model  # noqa: E402
from worlds import run_world  # noqa: E402

from megarl.config.schema import Config  # noqa: E402
from megarl.data.routing import RoutingShape  # noqa: E402
from megarl.data.sample import Group, Prompt, Sample  # noqa: E402
from megarl.model.hf_config import HFConfig  # noqa: E402
from megarl.rollout.client import EngineClient, EngineError, open_session  # noqa: E402
from megarl.rollout.process import engine_command, engine_environment, free_port  # noqa: E402
from megarl.rollout.protocol import GenerateRequest, Sampling  # noqa: E402

MODEL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=6, num_experts=32, num_experts_per_tok=4,
             moe_intermediate_size=32, head_dim=16)
SAMPLES, TOKENS = 4, 48


def config(path: Path, dtype: str, engine: str, python: str, replay: str) -> Config:
    return Config.model_validate({
        "cluster": {"device": "cpu"}, "model": {"path": str(path), "dtype": dtype, "implementation": "local"},
        "moe": {"replay": replay}, "data": {"sources": [{"path": "none.jsonl"}]},
        "reward": {"terms": [{"name": "exact"}]}, "objective": {"algorithm": "grpo"},
        "rollout": {"engine": engine, "sglang_python": python, "slots": 32, "max_response_tokens": TOKENS},
        "batch": {"max_tokens": 4096}})


async def sampled(settings: Config, path: Path, prompts: int, log: Path) -> list[Group]:
    """Groups by an engine of its own."""
    port = free_port("127.0.0.1")
    with log.open("wb") as out:
        process = subprocess.Popen(engine_command(settings, 0, 0, "127.0.0.1", port, "bench-0-0"), stdout=out,
                                   stderr=out, env=engine_environment(settings.rollout.sglang_python or sys.executable))
    random, hf = np.random.default_rng(7), HFConfig.read(path)
    try:
        async with open_session() as session:
            client = EngineClient(f"http://127.0.0.1:{port}", session)
            await _healthy(client, process, log)
            asked = [GenerateRequest(f"r{n}/", random.integers(2, 127, random.integers(4, 24)).astype(np.int32),
                                     Sampling(TOKENS, 1.0, n=SAMPLES), None if settings.rollout.engine == "sglang" else
                                     tuple(range(SAMPLES * n, SAMPLES * (n + 1))), RoutingShape.of(hf))
                     for n in range(prompts)]
            answers = await asyncio.gather(*[client.generate(request, vocab_size=hf.vocab) for request in asked])
    finally:
        process.kill()
        process.wait()
    groups = []
    for position, (request, done) in enumerate(zip(asked, answers, strict=True)):
        prompt = Prompt(position, 0, position, "bench", request.input_ids)
        groups.append(Group(prompt, [Sample(prompt, n, 0, one.response_ids, one.logprobs, one.finish,
                                            reward=float(n % 2), experts=one.experts) for n, one in enumerate(done)]))
    return groups


async def _healthy(client: EngineClient, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            return await client.health(timeout_s=5)
        except EngineError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the engine does not come up:\n{log.read_text(errors='replace')[-3000:]}") from None
            await asyncio.sleep(0.3)


def gaps(rank: int, path: str, settings: dict[str, Any]) -> dict[str, float]:
    """Of the policy on one rank."""
    from test_layouts import make_policy, read_samples

    from megarl.cluster.groups import make_groups
    from megarl.config.layout import Layout
    from megarl.data.buffer import Taken
    from megarl.data.exchange import gather_table
    from megarl.update import experts
    from megarl.update.experience import Experience

    groups = make_groups(Layout(1), datetime.timedelta(seconds=100), seed=1)
    policy, samples = make_policy(path, Config.model_validate(settings), groups), read_samples(path)
    taken = Taken(samples, [], gather_table(samples, groups), 0, (), {})
    minibatch, = Experience.build(taken, 0, policy.config, policy.objective, groups, policy.pace, 0,
                                  policy.replay).minibatches
    policy.old_logprobs(minibatch)
    log_ratio = torch.cat([(batch.per_token["old_logprobs"] - batch.per_token["engine_logprobs"])[batch.mask_t]
                           for batch in minibatch.batches]).double()
    stats = experts.statistics(policy.chunks, minibatch.loads, groups, minibatch.real_tokens)
    return {"tokens": len(log_ratio), "mean": float(log_ratio.abs().mean()), "max": float(log_ratio.abs().max()),
            "far": float((log_ratio.abs() > 0.1).double().mean()),
            "kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
            "disagreement": stats.get("moe/routing_disagreement", float("nan"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--sglang-python", default="")
    parser.add_argument("--prompts", type=int, default=48)
    arguments = parser.parse_args()
    from megarl.data.ragged import SampleBatch

    print(f"{arguments.engine}, {arguments.prompts} x {SAMPLES} samples\n\n"
          "| dtype | replay | tokens | mean gap | largest | above 0.1 | k3 | other experts |\n"
          "|---|---|---|---|---|---|---|---|")
    for dtype in ("bf16", "fp32"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            save_hf_model("qwen3_moe", path, dtype=torch.bfloat16 if dtype == "bf16" else None, **MODEL)
            settings = config(path, dtype, arguments.engine, arguments.sglang_python, "engine")
            groups = asyncio.run(sampled(settings, path, arguments.prompts, Path(folder) / "log"))
            torch.save(vars(SampleBatch.from_groups(groups)), path / "samples.pt")
            for replay in ("none", "engine"):
                tree = settings.model_dump() | {"moe": {"replay": replay}}
                one, = run_world(1, gaps, str(path), tree)
                print(f"| {dtype} | {replay} | {one['tokens']} | {one['mean']:.2e} | {one['max']:.2e} | "
                      f"{100 * one['far']:.2f} % | {one['kl']:.1e} | {100 * one['disagreement']:.2f} % |", flush=True)


if __name__ == "__main__":
    main()
