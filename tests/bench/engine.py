"""Embedded engine against `transformers` `generate()`: sampled tokens with their log-probs per second.

    python tests/bench/engine.py [--rounds 5] [--threads 1]

64 requests of different prompts at temperature 1. Their lengths are those of 64 conversations drawn from
tests/bench/data/azure_conv.csv, prompts and responses each scaled so that the longest has 64 tokens; end-of-sequence
tokens do not end anything. Only tokens that a request asked for count.

Sides, measured in turns in every round, fp32, with the same number of threads:
    engine     `python -m megarl.rollout.embedded`, 64 concurrent /generate over HTTP through megarl's client, JSON both
               ways, answers checked.
    generate   one left-padded batch; a stopping criterion ends each row at its own length, so generate() stops with the
               longest; log-probs from `output_logits`.
The ratio is of the best rounds: other load on the machine only ever adds time. All rounds are shown. The second ratio
is of CPU seconds over all rounds, on the engine's side those of server and client together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from megarl.rollout.client import EngineClient, EngineError, open_session  # noqa: E402
from megarl.rollout.process import engine_environment, free_port  # noqa: E402
from megarl.rollout.protocol import GenerateRequest, Sampling  # noqa: E402

REQUESTS, LONGEST = 64, 64
_COMMON = {"max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
_MOE = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "initializer_range": 0.05, **_COMMON}
MODELS = {
    "Qwen3-MoE, 4 layers": ("qwen3_moe", {**_MOE, "num_hidden_layers": 4}),
    "Qwen3-MoE, 8 layers": ("qwen3_moe", {**_MOE, "num_hidden_layers": 8}),
    "Qwen3, dense": ("qwen3", {"vocab_size": 15360, "hidden_size": 256, "num_hidden_layers": 8,
                               "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
                               "intermediate_size": 768, **_COMMON})}


def lengths(seed: int) -> tuple[list[int], list[int]]:
    """Prompt and response tokens of the requests."""
    rows = np.loadtxt(ROOT / "tests/bench/data/azure_conv.csv", delimiter=",", skiprows=1, dtype=int)
    drawn = rows[np.random.default_rng(seed).choice(len(rows), REQUESTS, replace=False)]
    return tuple(np.maximum(1, np.round(drawn[:, side] * LONGEST / drawn[:, side].max())).astype(int).tolist()
                 for side in (0, 1))


class Generate:
    """The side of transformers."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def run(self, prompts: list[list[int]], wanted: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, log-probs) of each request."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        width, ends = max(map(len, prompts)), torch.tensor(wanted)

        class OwnLength(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
                return ends <= input_ids.shape[1] - width

        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            result = self._model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                max_new_tokens=max(wanted), stopping_criteria=StoppingCriteriaList([OwnLength()]),
                return_dict_in_generate=True, output_logits=True)
            tokens = result.sequences[:, width:]
            logprobs = torch.stack(result.logits, 1).log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        return [(tokens[row, :count].numpy(), logprobs[row, :count].numpy()) for row, count in enumerate(wanted)]


class Engine:
    """The side of megarl: a server process and a client of it."""

    def __init__(self, path: str, vocab: int, threads: int) -> None:
        port = free_port("127.0.0.1")
        self._vocab, self._url = vocab, f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rollout.embedded", "--model-path", path, "--port", str(port),
             "--slots", str(REQUESTS), "--threads", str(threads), "--parent-pid", str(os.getpid())],
            cwd=ROOT, env=engine_environment(), stdout=subprocess.DEVNULL)
        asyncio.run(self._ready())

    async def _ready(self) -> None:
        async with open_session() as session:
            client = EngineClient(self._url, session, retries=0)
            while True:
                try:
                    return await client.health()
                except EngineError:
                    if self._process.poll() is not None:
                        raise
                    await asyncio.sleep(0.05)

    def run(self, prompts: list[list[int]], wanted: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, log-probs) of each request."""
        async def all_of_them() -> list:
            async with open_session() as session:
                client = EngineClient(self._url, session)
                return await asyncio.gather(*(
                    client.generate(GenerateRequest(f"{number}.", np.array(prompt), Sampling(count)),
                                    vocab_size=self._vocab)
                    for number, (prompt, count) in enumerate(zip(prompts, wanted, strict=True))))
        return [(one[0].response_ids, one[0].logprobs) for one in asyncio.run(all_of_them())]

    def cpu_s(self) -> float:
        """CPU seconds of server and client so far."""
        user, system = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + time.process_time()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def bench(name: str, family: str, settings: dict, rounds: int, threads: int, folder: str) -> float:
    """Print one model's lines; return engine over generate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine, generate = Engine(folder, settings["vocab_size"], threads), Generate(folder)
    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    cpu_s = {"engine": 0.0, "generate": 0.0}
    total = 0
    try:
        for number in range(-1, rounds):  # the first warms up
            prompt_lengths, wanted = lengths(0)
            total = sum(wanted)
            source = np.random.default_rng(number + 1)
            prompts = [source.integers(0, settings["vocab_size"], count).tolist() for count in prompt_lengths]
            sides = [("engine", engine), ("generate", generate)]
            for side, runner in sides if number % 2 else sides[::-1]:
                begun, used = time.perf_counter(), runner.cpu_s()
                result = runner.run(prompts, wanted)
                taken, used = time.perf_counter() - begun, runner.cpu_s() - used
                assert [len(tokens) for tokens, _ in result] == wanted
                if number >= 0:
                    seconds[side].append(taken)
                    cpu_s[side] += used
    finally:
        engine.close()
    print(f"{name} ({size / 1e6:.2f}M), {REQUESTS} requests, {total} tokens")
    for side, taken in seconds.items():
        every = " ".join(f"{value:.3f}" for value in taken)
        print(f"  {side:9s} {total / min(taken):9.0f} tokens/s   seconds: {every}")
    ratio = min(seconds["generate"]) / min(seconds["engine"])
    print(f"  ratio {ratio:.2f}; in CPU seconds {cpu_s['generate'] / cpu_s['engine']:.2f}", flush=True)
    return ratio


def main() -> None:
    """All models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each side")
    parser.add_argument("--models", default="", help="only those whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, (family, settings) in MODELS.items():
        if arguments.models in name:
            with tempfile.TemporaryDirectory() as folder:
                bench(name, family, settings, arguments.rounds, arguments.threads, folder)


if __name__ == "__main__":
    main()
