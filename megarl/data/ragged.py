"""Many samples as a few flat arrays: what leaders hold, exchange and train on. Numpy; no pickled objects anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.data import routing
from megarl.data.routing import RoutingShape
from megarl.data.sample import Group
from megarl.errors import UserMistake

META_COLUMNS = 8  # position, n, part, prompt tokens, response tokens, trained tokens, reward's bits, truncated


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each row of a flat array starts, and its end: int64 [n + 1]."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers start, start + 1, ... (length of them) of each row, one row after the other: int64 [sum lengths]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(np.asarray(starts, np.int64) - (ends - lengths), lengths)


@dataclass(frozen=True)
class SampleBatch:
    """N samples, flat.

    Attributes:
        position, n: int64 [N]; a sample's identity in the run.
        prompt_lengths, response_lengths: int64 [N], tokens; a prompt has at least one, a response may be empty.
        tokens: int32 [sum of both], each sample's prompt followed by its response.
        logprobs: float32 [sum of response_lengths], the engine's.
        rewards: float64 [N], NaN while unscored.
        truncated: bool [N], cut by the length limit.
        part: int64 [N], piece of an episode; zeros if not given.
        versions: int32 [sum of response_lengths], the number of the weights that sampled each response token, -1 for
            one that is not trained on; zeros if not given.
        advantages: float32 [sum of response_lengths] where turns are credited apart, NaN where the reward decides; NaN
            throughout if not given.
        experts: uint8 or uint16 [sum of lengths, MoE layers, k] (see `data.routing`); None where the engine's routing
            is not replayed.
    """

    position: np.ndarray
    n: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    part: np.ndarray | None = None
    versions: np.ndarray | None = None
    advantages: np.ndarray | None = None
    experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.part is None:
            object.__setattr__(self, "part", np.zeros(len(self.position), np.int64))
        if self.versions is None:
            object.__setattr__(self, "versions", np.zeros(len(self.logprobs), np.int32))
        if self.advantages is None:
            object.__setattr__(self, "advantages", np.full(len(self.logprobs), np.nan, np.float32))
        for name in ("n", "part", "prompt_lengths", "response_lengths", "rewards", "truncated"):
            if len(getattr(self, name)) != len(self.position):
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, position {len(self.position)}")
        if len(self) and (self.prompt_lengths.min() < 1 or self.response_lengths.min() < 0):
            raise ValueError("a prompt needs at least one token, a response at least none")
        answers = int(self.response_lengths.sum())
        if len(self.tokens) != self.lengths.sum() or any(
                len(one) != answers for one in (self.logprobs, self.versions, self.advantages)):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
                             f" and {len(self.advantages)} advantages for lengths that sum to {self.lengths.sum()} and "
                             f"{answers}")

        if self.experts is not None and len(self.experts) != len(self.tokens):
            raise ValueError(f"{len(self.experts)} rows of experts for {len(self.tokens)} tokens")

    def __len__(self) -> int:
        return len(self.position)

    @property
    def lengths(self) -> np.ndarray:
        """Prompt plus response, int64 [N]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def trained_lengths(self) -> np.ndarray:
        """Response tokens that are trained on, int64 [N]."""
        return np.diff(offsets(self.versions >= 0)[offsets(self.response_lengths)])

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> SampleBatch:
        """Flatten groups, in their order and in order of n."""
        samples = [sample for group in groups for sample in group.samples]

        def column(values: list, dtype: type) -> np.ndarray:
            return np.array(values, dtype)

        def flat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

        return cls(
            position=column([s.prompt.position for s in samples], np.int64),
            n=column([s.n for s in samples], np.int64),
            prompt_lengths=column([len(s.prompt.token_ids) for s in samples], np.int64),
            response_lengths=column([len(s.response_ids) for s in samples], np.int64),
            tokens=flat([part for s in samples for part in (s.prompt.token_ids, s.response_ids)], np.int32),
            logprobs=flat([s.logprobs for s in samples], np.float32),
            rewards=column([np.nan if s.reward is None else s.reward for s in samples], np.float64),
            truncated=column([s.finish == "length" for s in samples], np.bool_),
            part=column([s.part for s in samples], np.int64),
            versions=flat([s.token_versions() for s in samples], np.int32),
            advantages=flat([np.full(len(s.response_ids), np.nan) if s.advantages is None else s.advantages
                             for s in samples], np.float32),
            experts=routing.flattened([(s.experts, s.length) for s in samples]))

    def select(self, indices: Sequence[int] | np.ndarray) -> SampleBatch:
        """The samples at `indices`, in that order."""
        rows = np.asarray(indices, np.int64)
        tokens = ranges(offsets(self.lengths)[rows], self.lengths[rows])
        response = ranges(offsets(self.response_lengths)[rows], self.response_lengths[rows])
        return SampleBatch(self.position[rows], self.n[rows], self.prompt_lengths[rows], self.response_lengths[rows],
                           self.tokens[tokens], self.logprobs[response], self.rewards[rows], self.truncated[rows],
                           self.part[rows], self.versions[response], self.advantages[response],
                           None if self.experts is None else self.experts[tokens])

    def to_wire(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Plain tensors for a collective: meta int64 [N, META_COLUMNS], tokens int64 [flat], log-probs and advantages
        float32 [flat, 2], versions int32 [flat].

        Concatenating the tensors of several batches gives the wire of their concatenation. Rewards travel as the bits
        of a float64.
        """
        meta = np.stack((self.position, self.n, self.part, self.prompt_lengths, self.response_lengths,
                         self.trained_lengths, self.rewards.view(np.int64), self.truncated.astype(np.int64)), axis=1)
        return (torch.from_numpy(meta), torch.from_numpy(self.tokens.astype(np.int64)),
                torch.from_numpy(np.stack((self.logprobs, self.advantages), axis=1)),
                torch.from_numpy(self.versions.copy()))

    def experts_to_wire(self, shape: RoutingShape) -> torch.Tensor:
        """The experts as bytes, uint8 [sum of lengths, shape.token_bytes].

        Raises:
            UserMistake: no sample has any: they were sampled, or recorded, without.
        """
        whole = self.experts
        if whole is None:
            if len(self):
                raise UserMistake("the samples have no experts to replay", "moe.replay",
                                  "use none or old; engine needs samples that were drawn with moe.replay: engine")
            whole = np.full((len(self.tokens), len(shape.moe_layers), shape.top_k), shape.free, shape.dtype)
        if whole.shape[1:] != (len(shape.moe_layers), shape.top_k) or whole.dtype != shape.dtype:
            raise ValueError(f"experts are {whole.dtype} {whole.shape}, the model's {shape}")
        return torch.from_numpy(np.ascontiguousarray(whole).view(np.uint8).reshape(len(whole), shape.token_bytes))

    def with_experts(self, wire: torch.Tensor, shape: RoutingShape) -> SampleBatch:
        """The same samples with the experts of `experts_to_wire`."""
        flat = np.ascontiguousarray(wire.cpu().numpy()).view(shape.dtype)
        return replace(self, experts=flat.reshape(-1, len(shape.moe_layers), shape.top_k))

    @classmethod
    def from_wire(cls, meta: torch.Tensor, tokens: torch.Tensor, floats: torch.Tensor,
                  versions: torch.Tensor) -> SampleBatch:
        """The inverse of `to_wire`; tensors may be on any device."""
        table = np.ascontiguousarray(meta.cpu().numpy().T)
        logprobs, advantages = np.ascontiguousarray(floats.cpu().numpy().T)
        return cls(position=table[0], n=table[1], part=table[2], prompt_lengths=table[3], response_lengths=table[4],
                   tokens=tokens.cpu().numpy().astype(np.int32), logprobs=logprobs, advantages=advantages,
                   versions=versions.cpu().numpy().astype(np.int32), rewards=table[6].view(np.float64),
                   truncated=table[7].astype(np.bool_))
