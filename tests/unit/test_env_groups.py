"""Groups of episodes: rewards, retries, time limits, failures, limits at once, the counters."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import env_cases
import numpy as np
import pytest
from chat_templates import stop_ids_of, tokenizer_of
from conversations import PROMPT, Speaker

from megarl.config.schema import Config
from megarl.data.sample import Prompt
from megarl.errors import MachineFault, UserMistake
from megarl.objective.recipes import resolve
from megarl.reward.pool import ScoreReport
from megarl.rollout.environments.episode import Ask
from megarl.rollout.environments.groups import Environments, count_names, metrics
from megarl.rollout.issue import Work
from megarl.rollout.protocol import Completion, Sampling

MORE = replace(PROMPT, source="talk", label=3, extra={"level": 2})


def config_of(source: str, options: dict[str, Any] | None = None, reward: dict[str, Any] | None = None, *,
              objective: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **environment: Any
              ) -> Config:
    return Config.model_validate({
        "model": {"path": "none"}, "reward": reward or {}, "objective": objective or {},
        "data": {"sources": [{"path": "talk.jsonl", "environment": "talk"}], "max_prompt_tokens": 2000, **(data or {})},
        "rollout": {"max_response_tokens": 2000, "samples_per_prompt": 4},
        "environments": [{"name": "talk", "source": source, "options": options or {}, **environment}]})


class Engines:
    """`Issuer.complete` over a speaker; counts what goes on at once."""

    def __init__(self, delay_s: float = 0.0, family: str = "qwen2.5") -> None:
        self.speaker = Speaker(family, np.random.default_rng(1), delay_s=delay_s)
        self.names: list[str] = []
        self.seeds: list[int] = []
        self.fault: Exception | None = None
        self.lost = False

    async def __call__(self, ids: np.ndarray, seeds: list[int], work: Work, name: str) -> list[Completion] | None:
        assert work.sampling.n == 1 and len(seeds) == 1
        self.names.append(name)
        self.seeds.append(seeds[0])
        if self.fault is not None:
            raise self.fault
        if self.lost:
            return None
        return [await self.speaker(Ask(ids, seeds[0], work.sampling.max_new_tokens, (), name))]


def make(config: Config, engines: Engines, prompt: Prompt = MORE, n: int = 4, score: Any = None,
         resumes: bool = False) -> tuple[Any, ScoreReport, Counter[str]]:
    """One group of n episodes."""
    env_cases.EVENTS.clear()
    counts: Counter[str] = Counter()

    async def run() -> tuple[Any, ScoreReport]:
        environments = Environments(config, tokenizer_of("qwen2.5"), resolve(config.objective, 2000),
                                    stop_ids=stop_ids_of("qwen2.5"), score=score)
        assert environments.sources == {"talk"}
        work = Work(Sampling(2000, n=n), None, counts, resumes)
        try:
            return await environments.make(engines, prompt, list(range(10, 10 + n)), work)
        finally:
            await environments.close()

    return *asyncio.run(run()), counts


def test_rewards_of_turns_are_summed() -> None:
    engines = Engines()
    group, report, counts = make(config_of("env_cases:Count", {"finish": 0.5}), engines)
    assert [sample.reward for sample in group.samples] == [6.5] * 4 and report.failed == 0
    assert [(sample.n, sample.part, sample.seed) for sample in group.samples] == [(n, 0, 10 + n) for n in range(4)]
    assert {sample.prompt.position for sample in group.samples} == {5} and group.prompt is MORE
    assert len(set(engines.seeds)) == 12 and all(name.startswith("p5/") for name in engines.names)
    assert env_cases.EVENTS.count("made") == env_cases.EVENTS.count("closed") == 4
    sampled = sum(len(done.response_ids) for _, done in engines.speaker.asks)
    assert (counts["groups"], counts["samples"], counts["response_tokens"]) == (1, 4, sampled)
    assert counts["prompt_tokens"] == sum(len(ids) for ids, _ in engines.speaker.asks)
    found = metrics({name: counts[name] for name in count_names(config_of("env_cases:Count"))})
    assert found["environment/talk/reward"] == 6.5 and found["environment/talk/turns"] == 3
    assert found["environment/talk/failed"] == found["environment/talk/retries"] == 0
    assert found["environment/talk/samples"] == 1


@pytest.mark.parametrize("fault, kind, told", [
    ("raise", "error", "KeyError: 'the tool broke'"), ("reset", "error", "ValueError: no such world"),
    ("nan", "error", "a reward is nan"), ("shape", "error", "not (observation, reward, done)"),
    ("message", "error", "is not a chat message with a role"), ("exit", "error", "SystemExit: out of luck"),
    ("made", "error", "ValueError: no such option"), ("cancel", "error", "its code was cancelled"),
    ("cancel_self", "error", "its code was cancelled"),
    ("hang", "timeout", "no end within 0.3 s, after 1 turns")])
def test_failures_are_counted_and_never_scored(fault: str, kind: str, told: str) -> None:
    config = config_of("env_cases:Count", {"fault": fault}, retries=1, timeout_s=0.3)
    group, report, counts = make(config, Engines(), n=2)
    assert (report.samples, report.failed, report.dropped) == (2, 2, 2)
    assert report.failures == {("environment talk", kind): 2}
    assert told in report.describe() and "episode p5/0.1" in report.describe()
    assert [sample.reward for sample in group.samples] == [None] * (0 if fault in ("reset", "made") else 2)
    assert counts["environment/talk/failed"] == 2 and counts["environment/talk/attempts"] == 4
    assert env_cases.EVENTS.count("closed") == 4 * (fault != "made")  # two attempts of two episodes, each closed
    valued = config_of("env_cases:Count", {"fault": fault}, retries=0, timeout_s=0.3,
                       reward={"on_error": "value", "error_value": -1.0})
    group, report, _ = make(valued, Engines(), n=2)
    assert report.dropped == 0 and [sample.reward for sample in group.samples] == [-1.0] * len(group.samples)


@pytest.mark.parametrize("what, told", [
    ("tools", "ValueError"), ("call", "KeyError: 'function'"), ("parts", "AttributeError"), ("bytes", "TypeError"),
    ("json", "JSONDecodeError"), ("sync", "ValueError: it is not awaited"), ("finish", "ValueError: no end")])
def test_odd_environments_fail_their_episodes_alone(what: str, told: str) -> None:
    config = config_of("env_cases:odd", {"what": what}, retries=0, max_turns=2)
    _, report, _ = make(config, Engines(), n=1)
    assert report.failures == {("environment talk", "error"): 1} and told in report.describe()


def test_halves_of_characters_are_read_as_the_mark_for_what_is_none() -> None:
    group, report, _ = make(config_of("env_cases:odd", {"what": "half"}, max_turns=2), Engines(), n=1)
    assert report.failed == 0 and [sample.reward for sample in group.samples] == [2.0]
    assert "half of a character: \ufffd" in group.samples[0].text


def test_an_attempt_that_failed_is_made_again_with_the_same_seed() -> None:
    engines = Engines()
    group, report, counts = make(config_of("env_cases:Count", {"fault": "raise", "times": 1}), engines, n=1)
    assert report.failed == 0 and [sample.reward for sample in group.samples] == [6.0]
    assert counts["environment/talk/attempts"] == 2 and engines.names[:2] == ["p5/0.0/0", "p5/0.1/0"]
    assert engines.seeds[0] == engines.seeds[1] and len(set(engines.seeds)) == 3
    assert group.samples[0].trained.sum() == sum(len(done.response_ids) for _, done in engines.speaker.asks[1:])


def test_code_that_ignores_its_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from megarl.rollout.environments import play

    monkeypatch.setattr(play, "CLOSE_S", 0.1)
    begun = time.monotonic()
    config = config_of("env_cases:Count", {"fault": "stubborn"}, retries=0, timeout_s=0.2)

    async def run() -> Any:
        environments = Environments(config, tokenizer_of("qwen2.5"), resolve(config.objective, 2000),
                                    stop_ids=stop_ids_of("qwen2.5"), score=None)
        return await environments.make(Engines(), MORE, [1], Work(Sampling(2000), None, Counter()))

    env_cases.EVENTS.clear()
    loop = asyncio.new_event_loop()
    group, report = loop.run_until_complete(run())
    assert report.failures == {("environment talk", "timeout"): 1} and time.monotonic() - begun < 5
    assert "goes on although it was cancelled" in caplog.text and group.samples[0].reward is None
    env_cases.EVENTS.append("free")
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.wait(left, timeout=5))
    loop.close()


def test_engines_that_do_not_answer_drop_the_group() -> None:
    engines = Engines()
    engines.lost = True
    group, report, counts = make(config_of("env_cases:Count"), engines)
    assert group is None and report.failures == {("environment talk", "engines"): 4}
    assert counts["environment/talk/attempts"] == 4  # the engines were asked again by others already


@pytest.mark.parametrize("source", ["env_cases:Count", "env_cases:swallows", "env_cases:chatty"])
@pytest.mark.parametrize("fault", [MachineFault("no engine holds this run's weights"), UserMistake("refused")])
def test_faults_of_the_engines_end_the_run_even_if_code_catches_them(source: str, fault: Exception) -> None:
    engines = Engines()
    engines.fault = fault
    with pytest.raises(type(fault), match=str(fault)):
        make(config_of(source), engines)


def test_plain_functions() -> None:
    group, report, _ = make(config_of("env_cases:chatty", {"turns": 3}), Engines())
    assert [sample.reward for sample in group.samples] == [0 + 1 + 2 + 0.5] * 4 and report.failed == 0
    group, report, _ = make(config_of("env_cases:endless", max_turns=5), Engines(), n=1)
    assert report.failures == {("environment talk", "no_room"): 1} and group.samples[0].finish == "length"
    group, report, _ = make(config_of("env_cases:silent", retries=0), Engines(), n=1)
    assert group.samples == [] and "the model was never asked" in report.describe()
    group, report, _ = make(config_of("env_cases:chatty", {"reward": None}, retries=0), Engines(), n=1)
    assert "gave back no reward" in report.describe() and group.samples[0].reward is None


def test_more_turns_than_allowed_are_cut() -> None:
    group, report, counts = make(config_of("env_cases:Count", {"turns": 9}, max_turns=2), Engines(), n=1)
    assert [(sample.reward, sample.finish) for sample in group.samples] == [(3.0, "length")]
    assert report.failed == 0 and counts["environment/talk/cut"] == 1
    config = config_of("env_cases:Count", data={"max_prompt_tokens": 1})
    config = Config.model_validate({**config.model_dump(), "rollout": {"max_response_tokens": 20}})

    async def run() -> Any:
        environments = Environments(config, tokenizer_of("qwen2.5"), resolve(config.objective, 20),
                                    stop_ids=stop_ids_of("qwen2.5"), score=None)
        return await environments.make(Engines(), MORE, [1], Work(Sampling(20), None, Counter()))

    group, report = asyncio.run(run())
    assert report.failures == {("environment talk", "no_room"): 1} and group.samples == []


def test_terms_score_the_last_reply_or_the_given_text() -> None:
    asked = []

    async def score(samples: list[Any]) -> ScoreReport:
        report = ScoreReport(samples=len(samples))
        for sample in samples:
            asked.append((sample.text, sample.n))
            if sample.n == 2:
                report.failed, report.dropped = 1, 1
                report.failures["exact", "error"] += 1
            else:
                sample.reward, sample.reward_terms = 10.0 + sample.n, {"exact": 10.0 + sample.n}
        return report

    terms = {"terms": [{"name": "exact"}]}
    config = config_of("env_cases:chatty", {"reward": None, "text": "forty"}, terms, reward_terms=True)
    group, report, _ = make(config, Engines(), score=score)
    assert [sample.reward for sample in group.samples] == [11.0, 12.0, None, 14.0]  # 0 + 1 for its turns
    assert asked == [("forty", n) for n in range(4)] and (report.samples, report.failed) == (4, 1)
    assert group.samples[0].reward_terms == {"exact": 10.0}
    asked.clear()
    group, _, _ = make(config_of("env_cases:Count", {}, terms, reward_terms=True), Engines(), score=score)
    assert [sample.reward for sample in group.samples] == [16.0, 17.0, None, 19.0] and "forty" not in asked


def test_credit_by_turns() -> None:
    config = config_of("env_cases:Count", {"turns": 2}, objective={"algorithm": "dr_grpo"}, credit="turn",
                       discount=0.5)
    engines = Engines()
    group, _, _ = make(config, engines)  # all returns are equal: no advantage, but a number for each token
    for sample in group.samples:
        assert (sample.advantages == 0).all() and sample.advantages.shape == sample.response_ids.shape

    rewards = iter([[0.0, 4.0], [2.0, 0.0], [0.0, 0.0]])

    class Told:
        def __init__(self) -> None:
            self._rewards = list(next(rewards))

        async def reset(self, task: Any) -> None:
            return None

        async def step(self, action: Any) -> Any:
            reward = self._rewards.pop(0)
            return "go on", reward, not self._rewards

    env_cases.Told = Told
    config = config_of("env_cases:Told", objective={"algorithm": "dr_grpo"}, credit="turn", discount=0.5)
    group, _, _ = make(config, Engines(), n=3)
    # Returns [0 + .5 * 4, 4], [2, 0], [0, 0]: means 4/3 and 4/3.
    expected = [(2 / 3, 8 / 3), (2 / 3, -4 / 3), (-4 / 3, -4 / 3)]
    for sample, (first, second) in zip(group.samples, expected, strict=True):
        edges = np.flatnonzero(np.diff(sample.trained.astype(int)))
        assert sample.advantages[0] == pytest.approx(first) and sample.advantages[-1] == pytest.approx(second)
        assert (sample.advantages[:edges[0] + 1] == sample.advantages[0]).all()
        assert (sample.advantages[edges[0] + 1:edges[1] + 1] == 0).all()


def test_stop_strings_of_a_call_are_refused_where_answers_are_resumed() -> None:
    config = config_of("env_cases:chatty", {"stop": ["and"]}, retries=0)
    group, report, _ = make(config, Engines(), n=1, resumes=True)
    assert "stop is not supported with rollout.on_update: abort" in report.describe() and group.samples == []
    _, report, _ = make(config_of("env_cases:chatty", {"stop": [""]}, retries=0), Engines(), n=1)
    assert "stop=[''] is no string that is not empty" in report.describe()
    _, report, _ = make(config_of("env_cases:chatty", {"limit": 2.5}, retries=0), Engines(), n=1)
    assert "max_tokens=2.5 is no number of tokens" in report.describe()
    _, report, _ = make(config, Engines(), n=1)
    assert report.failed == 0
    _, report, _ = make(config_of("env_cases:chatty", retries=0), Engines(), n=1, resumes=True)
    assert report.failed == 0


@pytest.mark.parametrize("on_error", ["drop", "value"])
def test_no_value_for_an_episode_that_the_engines_failed(on_error: str) -> None:
    class Some(Engines):
        async def __call__(self, ids: Any, seeds: Any, work: Work, name: str) -> Any:
            return None if name.startswith("p5/2.") else await super().__call__(ids, seeds, work, name)

    reward = {"on_error": on_error, "error_value": -1.0 if on_error == "value" else None}
    group, report, _ = make(config_of("env_cases:Count", reward=reward), Some())
    assert report.failures == {("environment talk", "engines"): 1} and (report.failed, report.dropped) == (1, 1)
    if on_error == "value":  # every sample of a group has a value: this one cannot
        assert group is None
    else:
        assert [sample.n for sample in group.samples] == [0, 1, 3]


def test_episodes_at_once_are_limited() -> None:
    class Watch(Engines):
        running = most = 0

        async def __call__(self, *arguments: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await super().__call__(*arguments)
            finally:
                self.running -= 1

    engines = Watch(delay_s=0.005)
    make(config_of("env_cases:Count", concurrency=3), engines, n=12)
    assert engines.most == 3


def test_an_agent_over_http() -> None:
    engines = Engines()
    group, report, _ = make(config_of("env_cases:agent", retries=0), engines, n=6)
    assert report.failed == 0, report.describe()
    assert len(group.samples) == 6 and len(engines.speaker.asks) == 18  # glued: one sample for each
    assert sum(sample.reward for sample in group.samples) > 0
    trained = [sample.response_ids[sample.trained].tolist() for sample in group.samples]
    sampled: dict[str, list[int]] = {}
    for name, (_, done) in zip(engines.names, engines.speaker.asks, strict=True):
        sampled.setdefault(name.split("/")[1], []).extend(done.response_ids.tolist())
    assert sorted(trained) == sorted(sampled.values())


AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
for _ in range(2):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(
        {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 50}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
print("thinking")
print(json.dumps({"reward": 0.25, "level": task["extra"]["level"], "label": task.get("label")}))
"""


def test_a_program_is_an_environment(tmp_path: Any) -> None:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    group, report, _ = make(config_of("program", {"command": [sys.executable, str(script)]}, retries=0), Engines(), n=2)
    assert report.failed == 0, report.describe()
    assert [sample.reward for sample in group.samples] == [0.25] * 2
    assert all(sample.trained.sum() < len(sample.trained) for sample in group.samples)
    leaves = "import subprocess\nsubprocess.Popen(['sleep', '60'])\n"  # with its output, which stays open
    script.write_text(leaves + AGENT)
    begun = time.monotonic()
    _, report, _ = make(config_of("program", {"command": [sys.executable, str(script)]}, retries=0, timeout_s=20),
                        Engines(), n=1)
    assert report.failed == 0 and time.monotonic() - begun < 15, report.describe()
    script.write_text("import sys; sys.exit('out of luck')")
    _, report, _ = make(config_of("program", {"command": [sys.executable, str(script)]}, retries=0), Engines(), n=1)
    assert "ended with 1: out of luck" in report.describe()
    script.write_text("import time; time.sleep(60)")
    begun = time.monotonic()
    _, report, _ = make(config_of("program", {"command": [sys.executable, str(script)]}, retries=0, timeout_s=0.5),
                        Engines(), n=1)
    assert report.failures == {("environment talk", "timeout"): 1} and time.monotonic() - begun < 5
