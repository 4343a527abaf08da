"""What goes over the wire to an engine: SGLang 0.5.23's HTTP bodies as typed requests and checked answers.

Pure: no network, no torch. An engine is another program: whatever it answers is checked here, field by field, before
it may become a sample; anything unexpected raises `BadAnswer` and nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.data.routing import RoutingShape
from megarl.errors import MachineFault

FINISHES = ("stop", "length", "abort")


class EngineError(MachineFault):
    """An engine did not do what it was asked. `reason` is a short word for counters."""

    reason = "error"


class BadAnswer(EngineError):
    """The engine answered, but not with what the protocol says: it may run other code, or be broken."""

    reason = "bad_answer"


class WrongVersion(EngineError):
    """The answer was made with weights of another life of the job, or with weights older than allowed."""

    reason = "wrong_version"


def format_version(generation: str, number: int) -> str:
    """`<generation>:<number>`: the name of the `number`-th weights published in this life of the job."""
    return f"{generation}:{number}"


def parse_version(version: str) -> tuple[str, int] | None:
    """(generation, number) of a weight version; None for weights that no trainer published (an engine's own)."""
    generation, colon, number = version.rpartition(":")
    return (generation, int(number)) if colon and number.isdigit() else None


@dataclass(frozen=True)
class Expected:
    """Which weights may have made an answer.

    Attributes:
        version: the newest version published when the request was made, `<generation>:<number>`.
        or_newer: accepts newer ones too, published while the answer was being made.
    """

    version: str
    or_newer: bool = False

    def check(self, versions: Sequence[tuple[str, int, int]]) -> None:
        """Raise WrongVersion unless every span (version, start, end) is of this generation and new enough."""
        generation, number = _published(self.version)
        for version, _, _ in versions:
            found = parse_version(version)
            if found is None or found[0] != generation:
                raise WrongVersion(f"weights '{version}' are not of this life of the job ({generation})")
            if found[1] < number or (found[1] > number and not self.or_newer):
                raise WrongVersion(f"weights '{version}' where '{self.version}' was expected")


def _published(version: str) -> tuple[str, int]:
    found = parse_version(version)
    if found is None:
        raise ValueError(f"'{version}' is not <generation>:<number>")
    return found


@dataclass(frozen=True)
class Sampling:
    """`sampling_params` of a request, by SGLang's names. Defaults sample from the whole distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def to_json(self, seeds: Sequence[int] | None = None) -> dict[str, Any]:
        """The JSON object; `seeds` (one per sample) become `sampling_seed`, megarl's extension of SGLang's field."""
        body: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p,
            "top_k": self.top_k, "min_p": self.min_p, "n": self.n}
        if self.stop:
            body["stop"] = list(self.stop)
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if seeds is not None:
            body["sampling_seed"] = list(seeds)
        return body


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, `sampling.n` samples of it.

    Attributes:
        rid: unique per attempt. SGLang aborts by prefix, so it must not be the prefix of another one.
        input_ids: int32 [prompt tokens].
        sampling: how.
        seeds: one per sample; None where the engine has no seed per sample (SGLang).
        routing: of the model, if the experts of all tokens are wanted too.
        cached_for: the request finds nothing in SGLang's prefix cache but what others of the same name left there;
            None: of those without a name.
    """

    rid: str
    input_ids: np.ndarray
    sampling: Sampling
    seeds: tuple[int, ...] | None = None
    routing: RoutingShape | None = None
    cached_for: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The body of /generate, asking for the log-probs of the sampled tokens."""
        body = {"rid": self.rid, "input_ids": self.input_ids.tolist(), "return_logprob": True,
                "sampling_params": self.sampling.to_json(self.seeds)}
        if self.routing is not None:
            body["return_routed_experts"] = True
        return body if self.cached_for is None else {**body, "extra_key": self.cached_for}


@dataclass(frozen=True)
class Completion:
    """One sample as the engine gave it.

    Attributes:
        response_ids: int32 [tokens].
        logprobs: float32 [tokens], after temperature.
        finish: stop, length or abort.
        versions: spans (weight version, start, end) that cover the tokens without a gap.
        cached_tokens: prompt tokens that the engine did not compute again.
        experts: of prompt and response but the last token, [tokens, MoE layers, k] (`RoutingShape.decode`); None if
            they were not asked for. An aborted answer may lack them.
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    finish: str
    versions: list[tuple[str, int, int]]
    cached_tokens: int
    experts: np.ndarray | None = None

    def then(self, more: Completion) -> Completion:
        """This beginning and its continuation, which was asked for with all of this as its prompt."""
        place = len(self.response_ids)
        spans = self.versions + [(version, place + start, place + end) for version, start, end in more.versions]
        return Completion(np.concatenate((self.response_ids, more.response_ids)),
                          np.concatenate((self.logprobs, more.logprobs)), more.finish, spans, self.cached_tokens,
                          more.experts)


def parse_generate(answer: Any, request: GenerateRequest, vocab_size: int) -> list[Completion]:
    """The `n` completions of a /generate answer, in order.

    Raises:
        BadAnswer: wrong number or shape, a token outside [0, vocab_size), a log-prob that is not finite or above 0,
            lengths or token ids of the two lists that differ, version spans with gaps; experts that were asked for and
            are missing, of another shape, or impossible.
    """
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != request.sampling.n:
        raise BadAnswer(f"{len(items)} completions for n={request.sampling.n} ({request.rid})")
    try:
        return [_completion(item, request, vocab_size) for item in items]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise BadAnswer(f"answer to {request.rid} has another form: {type(error).__name__}: {error}") from error


def _completion(item: dict[str, Any], request: GenerateRequest, vocab_size: int) -> Completion:
    meta = item["meta_info"]
    ids = _integers(item["output_ids"])
    rows = meta["output_token_logprobs"]
    finish = meta["finish_reason"]["type"]
    if finish not in FINISHES:
        raise ValueError(f"finish reason {finish!r}")
    if len(rows) != len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(rows)} log-probs")
    if len(ids) > request.sampling.max_new_tokens or (len(ids) == 0 and finish != "abort"):
        raise ValueError(f"{len(ids)} tokens, finish {finish}, max_new_tokens {request.sampling.max_new_tokens}")
    if meta["prompt_tokens"] != len(request.input_ids):
        raise ValueError(f"prompt of {meta['prompt_tokens']} tokens, {len(request.input_ids)} were sent")
    logprobs = np.array([row[0] for row in rows], dtype=np.float32)
    if not np.array_equal(ids, _integers([row[1] for row in rows])):
        raise ValueError("the log-probs are of other tokens than output_ids")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"token ids in [{ids.min()}, {ids.max()}], vocabulary {vocab_size}")
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise ValueError("a log-prob is not finite or above 0")
    return Completion(ids.astype(np.int32), logprobs, finish, _spans(meta, len(ids)), int(meta.get("cached_tokens", 0)),
                      _experts(meta, request, len(ids), finish))


def _experts(meta: dict[str, Any], request: GenerateRequest, tokens: int, finish: str) -> np.ndarray | None:
    if request.routing is None:
        return None
    found = meta.get("routed_experts")
    if found is None:
        if finish == "abort":  # while it waited, nothing of it was computed
            return None
        raise ValueError("no routed_experts: was the engine started with --enable-return-routed-experts?")
    return request.routing.decode(found, len(request.input_ids) + tokens - 1)


def _integers(values: list[Any]) -> np.ndarray:
    """int64 [n]; ValueError for anything that is not a flat list of integers."""
    array = np.array(values if len(values) else [], dtype=None if len(values) else np.int64)
    if array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError("token ids are not a flat list of integers")
    return array


def _spans(meta: dict[str, Any], tokens: int) -> list[tuple[str, int, int]]:
    """Version spans; tokens without any were made by one version throughout."""
    if not tokens:
        return []
    if not meta.get("weight_versions"):
        return [(str(meta["weight_version"]), 0, tokens)]
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in meta["weight_versions"]]
    edges = [0] + [end for _, _, end in spans]
    if edges[-1] != tokens or any(start != edge or end < start
                                  for (_, start, end), edge in zip(spans, edges, strict=False)):
        raise ValueError(f"version spans {spans} do not cover {tokens} tokens")
    return spans


@dataclass(frozen=True)
class InitGroup:
    """Body of /init_weights_update_group: an engine joins a group as ranks rank_offset .. rank_offset + its TP - 1."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return dict(vars(self))


@dataclass(frozen=True)
class UpdateBucket:
    """Body of /update_weights_from_distributed: the tensors that the next broadcasts of the group bring, by HF name.

    Attributes:
        names, dtypes, shapes: one entry per tensor; dtypes as `float32`, `bfloat16`.
        group_name: the group made by /init_weights_update_group.
        load_format: None: one broadcast per tensor; "flattened_bucket": one for all, as bytes in this order.
        flush_cache: False only after an in_place pause: SGLang then cannot flush, and would report a failure.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str
    load_format: str | None = None
    flush_cache: bool = True

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {"names": list(self.names), "dtypes": list(self.dtypes), "shapes": [list(s) for s in self.shapes],
                "group_name": self.group_name, "load_format": self.load_format, "flush_cache": self.flush_cache,
                "abort_all_requests": False}


@dataclass(frozen=True)
class ModelInfo:
    """What /model_info says. `weight_version` names the engine's weights; see `parse_version`."""

    model_path: str
    weight_version: str

    @classmethod
    def from_json(cls, answer: Any) -> ModelInfo:
        """Raises BadAnswer if a field is missing."""
        try:
            return cls(str(answer["model_path"]), str(answer["weight_version"]))
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"/model_info without {error}") from error
