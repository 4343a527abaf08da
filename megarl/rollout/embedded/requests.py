"""/generate bodies: read, checked, and answered, by SGLang's field names. No torch."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.rollout.embedded.text import Text

_random = random.Random()  # own, so nobody's seed reaches it; asking the system each time costs a switch of threads


class BadRequest(ValueError):
    """The request cannot be served as it is: status 400 with this message."""


@dataclass(frozen=True)
class Params:
    """SGLang's sampling_params. `seeds`: one per sample."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seeds: tuple[int, ...] = ()


@dataclass(eq=False)
class Sequence:
    """One sample of a prompt, from request to answer.

    Attributes:
        rid: request id; SGLang's n > 1 makes ids of its own from the client's, and aborts by prefix.
        output_ids: int64 [tokens]; complete only while the sequence is in no slot.
        logprobs: float32 [tokens].
        spans: (weight version, start, end) over the output tokens.
        version: of the weights when it finished.
        cached_tokens: prompt tokens that were computed for another sample of the group.
        routed: int16 [tokens, layers, k], experts of the tokens from `group.routed_from` to the last but one; None if
            they were not asked for, or if the sequence was aborted while its keys and values were gone.
        era: counts the times that keys and values were forgotten, when its own were begun: those of a sequence that
            went on with old ones are not kept.
        finish: SGLang's finish_reason, None while unfinished.
    """

    rid: str
    group: Group
    seed: int
    output_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    version: str = ""
    cached_tokens: int = 0
    routed: np.ndarray | None = None
    retractions: int = 0
    era: int = 0
    finish: dict[str, Any] | None = None

    def mark(self, version: str, tokens: int) -> None:
        """Say that `version` made all output tokens up to number `tokens` that nobody has claimed yet."""
        start = self.spans[-1][2] if self.spans else 0
        if tokens > start:
            self.spans.append((version, start, tokens))


@dataclass(eq=False)
class Group:
    """A prompt and its samples.

    Attributes:
        prompt_ids: int64 [tokens], at least one.
        prefix: what was computed (`cache.Computed`) of the prompt but its last token, while samples wait that will
            need it.
        on_done: called with the group once all samples are finished, on the engine's thread.
        routed_from: first token whose experts are returned; None: no experts.
    """

    prompt_ids: np.ndarray
    params: Params
    routed_from: int | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prefix: Any = None
    unfinished: int = 0
    on_done: Callable[[Group], None] | None = None


@dataclass(frozen=True)
class Limits:
    """What this engine can serve: token ids below `vocab`, prompt and response together at most `context` tokens.

    `routing`: it records experts.
    """

    vocab: int
    context: int
    routing: bool = False


# Sampling parameters of SGLang that this engine has only at their neutral value.
_NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_new_tokens": (0,),
    "no_stop_trim": (False,), "spaces_between_special_tokens": (True,), "stop_regex": (None,), "regex": (None,),
    "json_schema": (None,), "ebnf": (None,), "structural_tag": (None,), "logit_bias": (None,),
    "custom_params": (None,), "stream_interval": (None,)}
# Fields of the body that would change the answer and that this engine does not have.
_ABSENT = ("stream", "top_logprobs_num", "token_ids_logprob", "return_hidden_states", "return_sampling_mask",
           "return_indexer_topk", "return_text_in_logprobs", "input_embeds", "image_data", "video_data", "audio_data",
           "lora_path", "session_params", "custom_logit_processor")


@dataclass(frozen=True)
class Generate:
    """A parsed /generate: groups in order; `single`: answered by one object instead of a list."""

    groups: list[Group]
    single: bool
    return_logprob: bool


def parse_generate(body: Any, limits: Limits, text: Text | None) -> Generate:
    """The groups of a /generate body.

    One prompt with n = 1 is `single`; several prompts or n > 1 are answered by a flat list, group by group.

    Raises:
        BadRequest: anything that cannot be served.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in _ABSENT:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine")
    if body.get("logprob_start_len") not in (None, -1):
        raise BadRequest("logprob_start_len: log-probs of prompt tokens are not supported by the embedded engine")
    prompts, many = _prompts(body, limits, text)
    params = [_params(item, text) for item in _per_prompt(body.get("sampling_params") or {}, len(prompts))]
    if len({item.n for item in params}) > 1:
        raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
    groups = [_group(ids, item, rid, limits, _routed_from(body, len(ids), limits)) for ids, item, rid in
              zip(prompts, params, _rids(body.get("rid"), len(prompts)), strict=True)]
    return Generate(groups, single=not many and params[0].n == 1, return_logprob=bool(body.get("return_logprob")))


def _prompts(body: dict, limits: Limits, text: Text | None) -> tuple[list[np.ndarray], bool]:
    ids, words = body.get("input_ids"), body.get("text")
    if (ids is None) == (words is None):
        raise BadRequest("Either text or input_ids should be provided, and not both.")
    if words is not None:
        many = isinstance(words, list)
        if text is None:
            raise BadRequest("text needs a tokenizer.json in the model directory; send input_ids")
        if not all(isinstance(item, str) for item in (words if many else [words])):
            raise BadRequest("text must be a string or a list of strings")
        ids = [text.encode(item) for item in words] if many else text.encode(words)
    many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = []
    for prompt in ids if many else [ids]:
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise BadRequest("input_ids must be a non-empty list of integers, or a list of such lists")
        if min(prompt) < 0 or max(prompt) >= limits.vocab:
            raise BadRequest(f"The input_ids contain values outside the vocabulary of {limits.vocab} tokens.")
        prompts.append(np.array(prompt, dtype=np.int64))
    return prompts, many


def _per_prompt(params: Any, prompts: int) -> list[dict]:
    items = params if isinstance(params, list) else [params] * prompts
    if len(items) != prompts or not all(isinstance(item, dict) for item in items):
        raise BadRequest("sampling_params must be an object, or a list with one per prompt")
    return items


def _rids(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [f"{_random.getrandbits(128):032x}" for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{number}" for number in range(count)]
    if not isinstance(rid, list) or len(rid) != count or not all(isinstance(item, str) for item in rid):
        raise BadRequest("rid must be a string, or a list with one per prompt")
    return rid


def _params(raw: dict, text: Text | None) -> Params:
    known = set(Params.__dataclass_fields__) - {"seeds"}
    for name, value in raw.items():
        if name in _NEUTRAL and value not in (None, *_NEUTRAL[name]):
            raise BadRequest(f"{name}={value!r} is not supported by the embedded engine")
        if name not in known and name not in _NEUTRAL and name != "sampling_seed":
            raise BadRequest(f"Unexpected keyword argument '{name}' in sampling_params")
    given = {name: raw[name] for name in known if raw.get(name) is not None}
    stop = given.get("stop", ())
    given["stop"] = _all((stop,) if isinstance(stop, str) else stop, "stop",
                         lambda item: isinstance(item, str) and item != "")
    given["stop_token_ids"] = _all(given.get("stop_token_ids", ()), "stop_token_ids",
                                   lambda item: type(item) is int and -(1 << 63) <= item < 1 << 63)
    params = Params(**given, seeds=_seeds(raw.get("sampling_seed"), given.get("n", 1)))
    _check(params)
    if params.stop and text is None:
        raise BadRequest("stop strings need a tokenizer.json in the model directory; send stop_token_ids")
    return params


def _all(values: Any, name: str, fits: Callable[[Any], bool]) -> tuple:
    """`values` as a tuple, all of which must fit."""
    _require(isinstance(values, list | tuple) and all(fits(value) for value in values),
             f"{name} must be a list of {'non-empty strings' if name == 'stop' else 'integers'}")
    return tuple(values)


def _seeds(raw: Any, n: Any) -> tuple[int, ...]:
    """One seed per sample. A single number is the first sample's, the others count up from it."""
    _require(type(n) is int and n >= 1, f"n must be a positive integer, got {n!r}.")
    if raw is None:
        return tuple(_random.getrandbits(64) for _ in range(n))
    seeds = raw if isinstance(raw, list) else [raw + number for number in range(n)] if type(raw) is int else []
    _require(len(seeds) == n and all(type(seed) is int for seed in seeds),
             f"sampling_seed must be an integer or a list of n={n} integers")
    return tuple(seed % (1 << 64) for seed in seeds)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadRequest(message)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(params: Params) -> None:
    """Ranges, in SGLang's words."""
    _require(type(params.max_new_tokens) is int and params.max_new_tokens >= 1,
             f"max_new_tokens must be at least 1, got {params.max_new_tokens!r}.")
    _require(_number(params.temperature) and 0 <= params.temperature < float("inf"),
             f"temperature must be non-negative, got {params.temperature!r}.")
    _require(_number(params.top_p) and 0 < params.top_p <= 1, f"top_p must be in (0, 1], got {params.top_p!r}.")
    _require(_number(params.min_p) and 0 <= params.min_p <= 1, f"min_p must be in [0, 1], got {params.min_p!r}.")
    _require(type(params.top_k) is int and (params.top_k == -1 or params.top_k >= 1),
             f"top_k must be -1 (disable) or at least 1, got {params.top_k!r}.")


def _routed_from(body: dict, tokens: int, limits: Limits) -> int | None:
    """Where the experts that a prompt of so many tokens asks for begin; None for no experts."""
    asked, start = body.get("return_routed_experts") or False, body.get("routed_experts_start_len") or 0
    _require(asked in (True, False), f"return_routed_experts must be true or false, got {asked!r}")
    if not asked:
        return None
    _require(limits.routing, "return_routed_experts needs an engine started with --enable-return-routed-experts")
    _require(type(start) is int and 0 <= start <= tokens,
             f"routed_experts_start_len must be in [0, {tokens}], the prompt's tokens, got {start!r}")
    return start


def _group(prompt_ids: np.ndarray, params: Params, rid: str, limits: Limits, routed_from: int | None) -> Group:
    total = len(prompt_ids) + params.max_new_tokens
    if total > limits.context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context} tokens. You "
            f"requested a total of {total} tokens: {len(prompt_ids)} tokens from the input messages and "
            f"{params.max_new_tokens} tokens for the completion.")
    group = Group(prompt_ids, params, routed_from, unfinished=params.n)
    group.sequences = [Sequence(rid if params.n == 1 else f"{rid}_{number}", group, seed)
                       for number, seed in enumerate(params.seeds)]
    return group


def answer(generate: Generate, text: Text | None) -> Any:
    """The body of the answer, once all groups are done."""
    items = [_item(sequence, text, generate.return_logprob)
             for group in generate.groups for sequence in group.sequences]
    return items[0] if generate.single else items


def _item(sequence: Sequence, text: Text | None, return_logprob: bool) -> dict[str, Any]:
    params, finish, ids = sequence.group.params, sequence.finish, sequence.output_ids.tolist()
    words = text.response(ids, finish, params.skip_special_tokens) if text is not None else ""
    meta = {
        "id": sequence.rid, "finish_reason": finish, "prompt_tokens": len(sequence.group.prompt_ids),
        "weight_version": sequence.version,
        "weight_versions": [{"version": version, "start": start, "end": end}
                            for version, start, end in sequence.spans],
        "num_retractions": sequence.retractions, "completion_tokens": len(ids),
        "cached_tokens": sequence.cached_tokens}
    if sequence.routed is not None:
        meta["routed_experts"] = base64.b64encode(sequence.routed.astype("<i4").tobytes()).decode("ascii")
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs.tolist(), ids, strict=True)]
    return {"text": words, "output_ids": ids, "meta_info": meta}
