"""Sections of the config tree on sampling: engines, conversations, rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import Probability, Section

CLOSE_S = 10.0  # for an environment to end after it was told to


class SamplingConfig(Section):
    """How an evaluation samples. (Training uses temperature only.)"""

    samples: PositiveInt = Field(1, description="per prompt")
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    top_p: Probability = Field(1.0, description="nucleus; 1: off")
    top_k: int = Field(-1, ge=-1, description="-1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="relative to the most likely token; 0: off")
    max_response_tokens: PositiveInt | None = Field(None, description="none: as in training")


class RolloutConfig(Section):
    """Sampling during training."""

    engine: Literal["embedded", "sglang"] = Field("embedded", description="embedded: megarl's own, for CPUs")
    engines_per_rank: PositiveInt = Field(1, description="engine processes under one rollout rank")
    samples_per_prompt: PositiveInt = Field(8, description="group size n")
    temperature: PositiveFloat = Field(1.0, description="of the engine, and of the trainer's log-probs")
    top_p: float = Field(1.0, description="must stay 1 in training: log-probs are taken before truncation")
    top_k: int = Field(-1, description="must stay -1 in training")
    min_p: float = Field(0.0, description="must stay 0 in training")
    max_response_tokens: PositiveInt = Field(256, description="longest response; a longer one is cut (truncated)")
    stop: list[str] = Field(default_factory=list, description="stop strings")
    stop_token_ids: list[int] = Field(default_factory=list, description="beside the tokenizer's end of sequence")
    retries: NonNegativeInt = Field(3, description="re-issues of a failed group before it is dropped and counted")
    request_timeout_s: PositiveFloat = Field(300.0, description="of one group's generation, seconds")
    groups_in_flight: PositiveInt = Field(64, description="requests at a time per data-parallel rank")
    max_lag: NonNegativeInt = Field(0, description="weight versions a token may be behind; 0 is synchronous")
    ahead: NonNegativeFloat | None = Field(None, description="steps' worth of groups that may be under way beyond "
                                           "those of the next step (over-sampling); null: max_lag")
    on_update: Literal["retract", "in_place", "abort", "finish"] = Field(
        "retract", description="unfinished answers at new weights; retract: go on with new keys and values; in_place: "
        "with the old ones; abort: are asked for again from where they were; finish: end first, with the old weights")
    slots: PositiveInt = Field(64, description="embedded engine: sequences decoded together")
    prefix_tokens: NonNegativeInt = Field(
        16384, description="embedded engine, where there are environments: tokens of finished turns whose keys and "
        "values are kept for the next turn; which of them are there depends on timing once they are more")
    start_attempts: PositiveInt = Field(3, description="starts in a row that an engine may fail before it is given up")
    no_engine_timeout_s: PositiveFloat = Field(
        60.0, description="a fault if groups or new weights wait for an engine for so long")
    urls: list[str] = Field(default_factory=list, description="http://host:port of engines that others started")
    gpus_per_rank: PositiveInt | None = Field(
        None, description="GPUs of a rollout rank; an SGLang engine that needs more spans consecutive ranks")
    sglang_python: str = Field("", description="python of SGLang's own environment; empty: this one")
    sglang_prefix: list[str] = Field(
        default_factory=list, description="words before that python: apptainer exec, srun --container-image ...")


class EnvironmentConfig(Section):
    """One environment: a task of several turns, for the data sources that name it."""

    name: str = Field(description="by which data sources and evaluation sets name it")
    source: str = Field(description="calculator, search, program; or module:name or file.py:name of your own")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of its class or function")
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral", "deepseek", "glm"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does")
    concurrency: PositiveInt = Field(256, description="episodes at a time per data-parallel rank")
    timeout_s: PositiveFloat = Field(600.0, description="of one attempt at an episode, seconds")
    retries: NonNegativeInt = Field(1, description="further attempts at an episode whose code raised or took too long")
    max_turns: PositiveInt = Field(16, description="replies of the model in an episode; one that needs more is cut")
    max_turn_tokens: PositiveInt | None = Field(
        None, description="of one reply; null: what rollout.max_response_tokens, observations included, leaves")
    credit: Literal["episode", "turn"] = Field(
        "episode", description="advantages of all tokens from the episode's reward, or of each turn's from its return")
    discount: float = Field(1.0, ge=0, le=1, description="of credit turn: weight of the next turn's return")
    reward_terms: bool = Field(False, description="add what reward.terms give for the last reply")


class RewardTerm(Section):
    """One reward function of the weighted sum."""

    name: str = Field(description="registered name, or module:function")
    weight: float = Field(1.0, description="factor in the sum")
    source: str = Field("", description="apply only to this data source; empty: to all")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class RewardConfig(Section):
    """How a sample is scored."""

    terms: list[RewardTerm] = Field(default_factory=list, description="summed with their weights; each data source "
                                    "needs one, unless its environment gives the reward")
    workers: PositiveInt = Field(2, description="worker processes per leader")
    timeout_s: PositiveFloat = Field(10.0, description="of scoring one sample, seconds")
    on_error: Literal["drop", "value"] = Field("drop", description="what happens to a sample whose reward failed")
    error_value: float | None = Field(None, description="the value for on_error: value")
