"""200 conversations with a real engine: samples glued over turns mean what the engine computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import TOOLS, stop_ids_of, tokenizer_of
from embedded_parts import EngineServer
from models import hf_model
from rollout_parts import GENERATION, VERSION, new_store

from megarl.config.schema import Config, SamplingConfig
from megarl.data.sample import Prompt
from megarl.objective.recipes import resolve
from megarl.rollout.dispatch import Draws
from megarl.rollout.environments.groups import Environments, count_names, metrics
from megarl.rollout.environments.protocol import Action, Task
from megarl.rollout.fleet import EngineRecord, Fleet, Registrar
from megarl.rollout.generate import Generator

PROMPTS, SAMPLES, TURN = 50, 4, 12
ENDS = list(range(100, 160))  # a random model hardly ever ends a turn by itself


class Chance:
    """Answers whatever the model says: as a tool, or as the user; two to five turns."""

    tools = TOOLS

    async def reset(self, task: Task) -> str:
        self._rng = np.random.default_rng(task.seed)
        self._left = int(self._rng.integers(2, 6))
        return f"{task.text}: what is {self._rng.integers(100)}+{self._rng.integers(100)}?"

    async def step(self, action: Action) -> tuple[Any, float, bool]:
        self._left -= 1
        text = str(self._rng.integers(10**6))
        role = "tool" if self._rng.random() < 0.6 else "user"
        return [{"role": role, "content": text}], action.tokens / 100, self._left == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of("qwen2.5")
    hf_model("qwen3", vocab_size=len(tokenizer), eos_token_id=stop_ids_of("qwen2.5"), max_position_embeddings=1024,
             pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(model: Path) -> Config:
    return Config.model_validate({
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"sources": [{"path": "talk.jsonl", "environment": "talk"}], "max_prompt_tokens": 700},
        "environments": [{"name": "talk", "source": "test_env_embedded:Chance", "max_turn_tokens": TURN}],
        "rollout": {"max_response_tokens": 300, "stop_token_ids": ENDS, "samples_per_prompt": SAMPLES}})


def collected(config: Config, url: str) -> Any:
    """What a leader gets of an evaluation on one engine."""
    store = new_store()
    registrar, record = Registrar(store, 0), EngineRecord("0.0", 1, url, "up")
    registrar.beat()
    registrar.write(record)
    fleet = Fleet(store, 1, 1, 60.0)
    fleet.mark_synced(VERSION, [record])
    tokenizer = tokenizer_of("qwen2.5")
    environments = Environments(config, tokenizer, resolve(config.objective, 300), stop_ids=stop_ids_of("qwen2.5"),
                                score=None)
    prompts = [Prompt(number, 0, number, "talk", np.array([1], np.int32), text=str(number))
               for number in range(PROMPTS)]
    generator = Generator(config, None, fleet, store, Draws(), generation=GENERATION, leader_index=0, leaders=1,
                          vocab_size=len(tokenizer), decode=tokenizer.decode, environments=environments)
    try:
        return generator.generate_eval(prompts, SamplingConfig(samples=SAMPLES), 7, version=VERSION)
    finally:
        generator.close()


@pytest.fixture(scope="module")
def result(model: Path) -> Any:
    with EngineServer(model, "--slots", "64", "--prefix-tokens", "200000", "--weight-version", VERSION) as server:
        yield collected(config_of(model), f"http://127.0.0.1:{server.port}")


def test_every_conversation_is_one_sample(result: Any) -> None:
    samples = [sample for group in result.groups for sample in group.samples]
    assert len(samples) == PROMPTS * SAMPLES and {sample.part for sample in samples} == {0}
    assert len({(sample.prompt.position, sample.n) for sample in samples}) == len(samples)
    found = metrics({name: result.counts[name] for name in count_names(config_of(Path("x")))})
    assert 2 < found["environment/talk/turns"] < 5 and found["environment/talk/failed"] == 0
    for sample in samples:
        runs = np.flatnonzero(np.diff(np.append(False, sample.trained).astype(int)) == 1)
        assert 2 <= len(runs) <= 5 and sample.trained[0] and sample.trained[-1] and len(sample.versions) == len(runs)
        assert sample.reward == pytest.approx(sample.trained.sum() / 100)
    ends = {int(sample.response_ids[-1]) in (*ENDS, *stop_ids_of("qwen2.5")) for sample in samples}
    assert ends == {True, False}  # some replies end, others are cut


def test_the_engine_s_log_probs_are_those_of_the_glued_tokens(result: Any, model: Path) -> None:
    """The whole sample through transformers, once: had a turn been asked with other tokens than stand in the sample,
    or an observation been lost or doubled, its log-probs would be others."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst, tokens = 0.0, 0
    for group in result.groups:
        for sample in group.samples:
            ids = torch.from_numpy(np.concatenate((sample.prompt.token_ids, sample.response_ids)).astype(np.int64))
            with torch.no_grad():
                logprobs = reference(ids[None]).logits[0].log_softmax(-1)
            start = len(sample.prompt.token_ids)
            expected = logprobs[start - 1:-1].gather(1, ids[start:, None])[:, 0].numpy()
            trained = sample.trained
            worst = max(worst, float(np.abs(expected - sample.logprobs)[trained].max()))
            tokens += int(trained.sum())
            assert (sample.logprobs[~trained] == 0).all()
    assert worst < 2e-5 and tokens > 3000


def test_turns_are_computed_once(result: Any) -> None:
    """Later turns find what came before them; first turns share a text, which is not looked for."""
    cached = sum(len(sample.prompt.token_ids) + int(np.flatnonzero(~sample.trained[:turn])[-1]) - tail
                 for group in result.groups for sample in group.samples for turn, tail in _later_turns(sample))
    assert result.counts["cached_tokens"] == cached > 0.6 * result.counts["prompt_tokens"]


def _later_turns(sample: Any) -> list[tuple[int, int]]:
    """(where the reply begins, tokens of context before it) of all turns but the first."""
    begins = np.flatnonzero(np.diff(np.append(False, sample.trained).astype(int)) == 1)[1:]
    ends = np.flatnonzero(np.diff(sample.trained.astype(int)) == -1)
    return [(int(begin), int(begin - end - 1)) for begin, end in zip(begins, ends, strict=True)]


def test_the_same_seeds_give_the_same_conversations(result: Any, model: Path) -> None:
    """On another engine that keeps nothing between turns."""
    with EngineServer(model, "--slots", "16", "--weight-version", VERSION) as server:
        again = collected(config_of(model), f"http://127.0.0.1:{server.port}")
    assert again.counts["cached_tokens"] == 0
    pairs = [(one, other) for group, twin in zip(result.groups, again.groups, strict=True)
             for one, other in zip(group.samples, twin.samples, strict=True)]
    same = [one.response_ids.tolist() == other.response_ids.tolist() for one, other in pairs]
    assert np.mean(same) > 0.98  # rounding may turn a choice
