"""What no single key shows: checks across keys, and of the files that they name. Needs no cluster and no torch.

`check` never stops at the first mistake. Each rule is a generator over the config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megarl.config import debug, engines, environments, files, keys, moe, options, prompts, sglang
from megarl.config.layout import Layout, check_model
from megarl.config.load import Origin, read
from megarl.config.schema import Config
from megarl.config.stages import parts
from megarl.errors import UserMistake, UserMistakes

if TYPE_CHECKING:
    from megarl.objective.recipes import Objective

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        mistakes: with their place in the file.
        notes: what is allowed and may surprise.
        summary: one line on what would run; "" if there are mistakes.
    """

    mistakes: list[UserMistake]
    notes: list[str]
    summary: str


def check(config: Config, origin: Origin | None = None, environ: Mapping[str, str] = os.environ) -> Report:
    """Look across the keys of a config.

    Args:
        config: as loaded.
        origin: where its values stand, for the messages.
        environ: WORLD_SIZE is compared with the partitions where it is set.
    """
    origin = origin or Origin()
    found: list[UserMistake] = []
    for rule in (_rollout, _sync, _reward, _objective, _batch, _names, _evaluation, _paths):
        found.extend(rule(config))
    found.extend(_partitions(config, environ))
    found.extend(options.check_megatron(config.megatron))
    found.extend(moe.check_hardware(config))
    late = [step for step in config.observe.trace_steps if step > config.run.steps]
    notes = [f"observe.trace_steps: the run has no step {late[0]}"] if late else []
    found.extend(debug.check(config, notes))
    found.extend(engines.check(config))
    found.extend(environments.check(config))
    found.extend(sglang.check(config, notes))
    layout = _collect(found, lambda: Layout.from_config(config))
    if layout:
        found.extend(_layout(config, layout, notes))
    mistakes = [_located(mistake, origin) for mistake in found]
    return Report(mistakes, notes, "" if mistakes or layout is None else _summary(config, layout))


def load_checked(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Report]:
    """Load and check a config.

    Raises:
        UserMistake: all mistakes together.
    """
    config, origin = read(path, overrides)
    report = check(config, origin)
    if report.mistakes:
        raise UserMistakes(report.mistakes)
    return config, report


def _located(mistake: UserMistake, origin: Origin) -> UserMistake:
    """The same mistake with its key's file and line, if `where` is a key."""
    parts = tuple(int(part) if part.isdigit() else part for part in mistake.where.split("."))
    known, _ = keys.lookup(parts)
    is_key = bool(known) and (len(known) == len(parts) or known in (["megatron"], ["sglang"]))
    return UserMistake(mistake.what, origin.where(parts), mistake.remedy) if is_key else mistake


def _collect(found: list[UserMistake], action: Callable[[], T]) -> T | None:
    """The action's result; a mistake that it raises joins `found`."""
    try:
        return action()
    except UserMistake as mistake:
        found.append(mistake)
        return None


def _rollout(config: Config) -> Iterator[UserMistake]:
    rollout = config.rollout
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if getattr(rollout, name) != neutral:
            yield UserMistake(
                f"{getattr(rollout, name)} truncates the distribution, but engines return log-probs from before the "
                "truncation: importance weights would be biased", f"rollout.{name}",
                f"leave it at {neutral}; evaluation may truncate (eval.sets.0.sampling.{name})")
    if rollout.ahead is not None and rollout.ahead > rollout.max_lag:
        yield UserMistake(f"what is sampled {rollout.ahead:g} steps ahead would be older than rollout.max_lag "
                          f"({rollout.max_lag}) allows when it is trained on", "rollout.ahead",
                          "use at most rollout.max_lag, or raise that")
    if rollout.stop and rollout.on_update == "abort":
        yield UserMistake("a stop string may lie across the place where an aborted answer is continued, and would not "
                          "be seen", "rollout.on_update", "use retract, or stop at tokens (rollout.stop_token_ids)")
    if rollout.samples_per_prompt < 2:
        yield UserMistake("1 sample a group: an advantage is relative to the group's mean, so all would be 0",
                          "rollout.samples_per_prompt", "use 2 or more")
    if "" in rollout.stop:
        yield UserMistake("an empty stop string ends every response at once", "rollout.stop", "leave it out")


def _sync(config: Config) -> Iterator[UserMistake]:
    sync, rollout, sglang = config.sync, config.rollout, config.rollout.engine == "sglang"
    if sync.overlap and not rollout.max_lag:
        yield UserMistake("with rollout.max_lag 0 the next samples wait for the new weights: there is nothing to "
                          "overlap with", "sync.overlap", "set it to false, or rollout.max_lag to 1 or more")
    if sync.directory and sync.transport == "broadcast":
        yield UserMistake("broadcast writes no files", "sync.directory", "remove it, or set sync.transport: disk")
    if sglang and sync.transport == "delta" and (rollout.urls or engines.nodes(config) > 1):
        yield UserMistake("SGLang takes changed weights through a relay that megarl starts beside it: not for engines "
                          "that others started, or of several hosts", "sync.transport", "use broadcast or disk")
    if sglang and sync.transport == "broadcast" and config.sglang.get("pp_size", 1) != 1:
        yield UserMistake("a broadcast reaches tensor-parallel ranks; an engine of several pipeline stages would take "
                          "weights wrongly", "sglang.pp_size",
                          "use 1 and raise sglang.tp_size, or sync.transport: disk")
    count = config.cluster.rollouts // engines.nodes(config) * rollout.engines_per_rank + len(rollout.urls)
    if sglang and sync.verify and count == 1:
        yield UserMistake("SGLang's checksums are of its own fused tensors: engines are compared with each other, and "
                          "there is only one", "sync.verify", "set it to false")


def _reward(config: Config) -> Iterator[UserMistake]:
    from megarl.reward import registry  # light, and only this rule needs it
    from megarl.rollout.environments.load import scored_by_terms

    reward = config.reward
    if reward.on_error == "value" and reward.error_value is None:
        yield UserMistake("on_error is value, but no value is given", "reward.error_value",
                          "give a number, or set reward.on_error: drop")
    if reward.on_error == "drop" and reward.error_value is not None:
        yield UserMistake(f"{reward.error_value} would not be used: on_error is drop", "reward.error_value",
                          "remove it, or set reward.on_error: value")
    mistakes: list[UserMistake] = []
    terms = [registry.Term(**term.model_dump()) for term in reward.terms]
    for number, term in enumerate(terms):
        _collect(mistakes, lambda term=term, number=number: registry.bind(term, f"reward.terms.{number}"))
    if not mistakes:
        _collect(mistakes, lambda: registry.check_terms(terms, scored_by_terms(config)))
    yield from mistakes


def _objective(config: Config) -> Iterator[UserMistake]:
    found: list[UserMistake] = []
    _collect(found, lambda: _resolved(config))
    yield from found


def _resolved(config: Config) -> Objective:
    from megarl.objective.recipes import resolve  # pure, but above this package

    return resolve(config.objective, config.rollout.max_response_tokens)


def _batch(config: Config) -> Iterator[UserMistake]:
    prompts, minibatches = config.data.prompts_per_step, config.batch.minibatches
    if prompts % minibatches:
        fits = [d for d in range(1, min(prompts, 4 * minibatches) + 1) if prompts % d == 0]
        yield UserMistake(f"{minibatches} does not divide the {prompts} groups of a step (data.prompts_per_step)",
                          "batch.minibatches", f"use one of {fits}")


def _names(config: Config) -> Iterator[UserMistake]:
    for section, entries in (("data.sources", config.data.sources), ("eval.sets", config.eval.sets)):
        names: set[str] = set()
        for number, entry in enumerate(entries):
            name = entry.name or Path(entry.path).stem
            if name in names:
                yield UserMistake(f"two of {section} are named {name!r}", f"{section}.{number}.name",
                                  "give each its own name")
            names.add(name)


def _evaluation(config: Config) -> Iterator[UserMistake]:
    for number, entry in enumerate(config.eval.sets):
        where, sampling = f"eval.sets.{number}", entry.sampling
        if too_many := [k for k in entry.pass_at if k > sampling.samples]:
            yield UserMistake(f"pass@{too_many[0]} needs {too_many[0]} samples, but there are {sampling.samples}",
                              f"{where}.pass_at", f"raise {where}.sampling.samples or lower k")
        if sampling.temperature == 0 and sampling.samples > 1:
            yield UserMistake(f"{sampling.samples} samples at temperature 0 are all the same",
                              f"{where}.sampling.samples", "use 1, or a temperature above 0")
    if config.eval.every and not config.eval.sets:
        yield UserMistake(f"every {config.eval.every} steps, but there is nothing to evaluate on", "eval.sets",
                          "name a set, or set eval.every: 0")


def _partitions(config: Config, environ: Mapping[str, str]) -> Iterator[UserMistake]:
    cluster = config.cluster
    need = cluster.trainers + cluster.rollouts
    world = environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) != need:
        yield UserMistake(f"{cluster.trainers} trainers + {cluster.rollouts} rollouts = {need} ranks, but WORLD_SIZE "
                          f"is {world}", "cluster.trainers", f"start {need} ranks, or change the partitions")
    host, _, port = cluster.store.rpartition(":")
    if cluster.store != "auto" and not (host and port.isdigit() and 0 < int(port) < 65536):
        yield UserMistake(f"{cluster.store!r} is neither auto nor host:port", "cluster.store",
                          "for example node1:29400")
    if cluster.device == "cpu" and config.model.implementation == "transformer_engine":
        yield UserMistake("transformer_engine needs a GPU, but cluster.device is cpu", "model.implementation",
                          "use local or auto")


def _paths(config: Config) -> Iterator[UserMistake]:
    yield from files.check_run_dir(config.run.dir)
    named = (("data.sources", config.data.sources), ("eval.sets", config.eval.sets))
    for section, entries in () if config.debug.replay_experience else named:
        for number, entry in enumerate(entries):
            columns = [column for column in (entry.prompt, entry.label) if column]
            yield from files.check_prompts(entry.path, columns, f"{section}.{number}",
                                           partial(prompts.check, config, entry))
    objective = _collect([], lambda: _resolved(config))
    in_path, in_weights = files.weights_read(config, objective is None or objective.needs_reference)
    if not Path(config.model.path).is_dir():
        yield UserMistake(f"{config.model.path} is not a directory", "model.path",
                          "give the directory of a Hugging Face checkpoint")
    else:
        yield from files.check_model_files(config.model.path, in_path)
    if in_weights:
        yield from files.check_weights(config.model.weights)


def _layout(config: Config, layout: Layout, notes: list[str]) -> Iterator[UserMistake]:
    """The model against the layout, lengths against the model and the packing, the batch against the ranks."""
    from megarl.model.families.tables import padded_groups
    from megarl.model.hf_config import HFConfig  # json only, but above this package

    found: list[UserMistake] = []
    known = Path(config.model.path).is_dir()  # else _paths has told
    if known and (hf := _collect(found, lambda: HFConfig.read(config.model.path))):
        _collect(found, lambda: check_model(
            layout, kv_heads=hf.kv_heads, experts=hf.experts, ffn=hf.moe_ffn or hf.ffn, beside=hf.beside_ffns,
            padded_heads=hf.latent is None))
        _collect(found, lambda: parts(hf, layout, config.parallel.layers_per_stage))
        if hf.kv_heads % layout.tensor and hf.latent is None:
            notes.append(f"parallel.tensor {layout.tensor} does not divide the model's {hf.kv_heads} key/value heads: "
                         f"they are padded to {padded_groups(hf.kv_heads, layout.tensor)}")
        if hf.latent and config.model.implementation == "transformer_engine":
            found.append(UserMistake("transformer_engine was not tried with latent attention", "model.implementation",
                                     "use auto or local"))
        found.extend(_lengths(config, hf.max_positions))
        found.extend(moe.check(config, hf))
    yield from found
    samples = config.data.prompts_per_step // config.batch.minibatches * config.rollout.samples_per_prompt
    if samples < layout.data:
        yield UserMistake(f"a minibatch has {samples} samples for {layout.data} data-parallel ranks: some would idle",
                          "data.prompts_per_step", "raise it, or lower batch.minibatches")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    unit = layout.sequence_multiple
    longest = -(-(prompt + response) // unit) * unit
    if longest > config.batch.max_tokens:
        what = (f"a prompt and its response may take {longest} padded tokens, more than batch.max_tokens "
                f"({config.batch.max_tokens})")
        if config.batch.on_long_sequence == "error":
            yield UserMistake(what, "batch.max_tokens", f"use at least {longest}, or batch.on_long_sequence: own")
        else:
            notes.append(f"{what}: such a sequence gets a micro-batch of its own")


def _lengths(config: Config, positions: int) -> Iterator[UserMistake]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response > positions:
        yield UserMistake(
            f"{response} after a prompt of up to {prompt} tokens (data.max_prompt_tokens) is more than the model's "
            f"{positions} positions", "rollout.max_response_tokens",
            f"use at most {positions - prompt}" if prompt < positions else "lower data.max_prompt_tokens too")
    for number, entry in enumerate(config.eval.sets):
        own = entry.sampling.max_response_tokens
        if own and prompt + own > positions:
            yield UserMistake(f"{own} after a prompt of up to {prompt} tokens is more than the model's {positions} "
                              "positions", f"eval.sets.{number}.sampling.max_response_tokens",
                              f"use at most {max(positions - prompt, 1)}")


def _summary(config: Config, layout: Layout) -> str:
    data, rollout, batch = config.data, config.rollout, config.batch
    samples = data.prompts_per_step * rollout.samples_per_prompt
    tokens = samples * (data.max_prompt_tokens + rollout.max_response_tokens)
    updates = batch.minibatches * batch.epochs
    return (f"{layout.describe()} + {engines.describe(config)} | {_resolved(config).describe()} | "
            f"{data.prompts_per_step} prompts x {rollout.samples_per_prompt} = {samples} samples, at most {tokens:,} "
            f"tokens and {updates} update{'s' if updates > 1 else ''} a step, {config.run.steps} steps")
