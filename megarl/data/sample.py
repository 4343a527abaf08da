"""What travels between rollout and training: prompts, samples, groups. Pure data; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data, tokenised.

    Attributes:
        position: number of this draw since the start of the run; orders all prompts of a run.
        epoch, index: pass over the data, and row within its source; with the sample number, a sample's identity.
        source: name of the data source.
        token_ids: int32 [prompt tokens].
        label: the reference answer, as in the file (any JSON value).
        text: the prompt as text or chat messages, for reward functions and records.
        extra: the row's other columns.
    """

    position: int
    epoch: int
    index: int
    source: str
    token_ids: np.ndarray
    label: Any = None
    text: Any = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One response to a prompt, by an engine.

    Attributes:
        prompt: what was answered.
        n: number within the group; (prompt.position, n) is unique in a run.
        seed: the sampling seed, a function of (run seed, position, n).
        response_ids: int32 [tokens], the stop token included when one was sampled. Everything after the prompt: over
            several turns also what the environment said.
        logprobs: float32 [tokens], the engine's, after temperature; 0 where the engine did not sample.
        finish: why it ended.
        text: the response decoded, without special tokens.
        versions: spans (version, start, end) over the sampled tokens of the response.
        reward: weighted sum of the reward terms, None while unscored.
        reward_terms: each term's value.
        part: number of this piece of an episode that did not stay one sequence of tokens; pieces share (position, n).
        trained: bool [tokens], False for tokens that are context only (an environment's); None: all are trained on.
        advantages: float32 [tokens], where turns are credited apart; None: of the reward, the same for all tokens.
        experts: uint8 or uint16 [rows, MoE layers, k], where the engine routed the first tokens of prompt and response
            (all but the last one, if it computed them all); None where routing is not replayed.
    """

    prompt: Prompt
    n: int
    seed: int
    response_ids: np.ndarray
    logprobs: np.ndarray
    finish: str  # "stop" | "length" | "abort"
    text: str = ""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    reward: float | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    part: int = 0
    trained: np.ndarray | None = None
    advantages: np.ndarray | None = None
    experts: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Prompt plus response, in tokens."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens of the response the model has said."""
        return len(self.response_ids) if self.trained is None else int(self.trained.sum())

    def token_versions(self) -> np.ndarray:
        """The number of the weights that made each response token, int32 [tokens]; -1 where it is not trained on.

        0 throughout if the sample has no spans.

        Raises:
            ValueError: a token that is trained on lies in no span.
        """
        made = np.full(len(self.response_ids), -1 if self.versions else 0, np.int32)
        for version, start, end in self.versions:
            made[start:end] = version_number(version)
        trained = np.ones(len(made), bool) if self.trained is None else self.trained
        if (made[trained] < 0).any():
            raise ValueError(f"sample {self.n} of prompt {self.prompt.position}: spans {self.versions} leave out "
                             "tokens that are trained on")
        return np.where(trained, made, np.int32(-1))


@dataclass
class Group:
    """All samples of one prompt, in order of n."""

    prompt: Prompt
    samples: list[Sample]


def version_number(version: str) -> int:
    """The number in a weight version `<generation>:<number>`."""
    return int(version.rpartition(":")[2])


def sample_seed(run_seed: int, position: int, n: int) -> int:
    """The seed of sample `n` of the prompt at `position`: a 63-bit hash, the same on any machine.

    SplitMix64 (Steele, Lea, Flood 2014) over the three numbers, so that neighbours are unrelated.
    """
    mask = (1 << 64) - 1
    state = 0
    for part in (run_seed, position, n):
        state = (state + part + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
