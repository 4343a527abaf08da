"""Builds the parts of a trainer rank and takes them down again; `train.py` says what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.checkpoint.files import whole
from megarl.checkpoint.find import Found, find
from megarl.checkpoint.rules import is_fixed
from megarl.checkpoint.state import Checkpoints, Progress
from megarl.cluster.groups import start_trainers
from megarl.cluster.partition import Partition
from megarl.cluster.store import Control, Meeting
from megarl.config.engines import describe
from megarl.config.layout import Layout
from megarl.config.schema import Config
from megarl.data.buffer import ExperienceBuffer
from megarl.data.dump import differences, write_config
from megarl.data.groups_file import read_groups, read_positions
from megarl.data.prompts import PromptStream, load_eval_set
from megarl.data.replay import ReplayBuffer
from megarl.data.sample import Group
from megarl.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.objective.advantages import has_signal
from megarl.objective.recipes import Objective, resolve
from megarl.observe.console import banner
from megarl.observe.report import Reporter
from megarl.reward.pool import RewardPool
from megarl.reward.registry import Term, term_keys
from megarl.rollout.admission import fitting
from megarl.rollout.course import Course
from megarl.rollout.dispatch import Dispatcher, Draws, held_numbers
from megarl.rollout.environments.groups import Environments, Score, count_names, metrics
from megarl.rollout.external import ExternalEngines, address_towards
from megarl.rollout.fleet import Fleet, beat_for_trainers, request_stop
from megarl.rollout.generate import Generator
from megarl.rollout.ledger import Announcements
from megarl.rollout.records import forget_after
from megarl.sync.publish import WeightPublisher
from megarl.trainer import STOP, Sampling, Source, Trainer
from megarl.update.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def trainer(config: Config, partition: Partition, control: Control, run_dir: Path) -> Iterator[Trainer]:
    """Build this trainer's parts, resume from the newest checkpoint, wait for the engines; take all down at the end."""
    layout, objective = Layout.from_config(config), resolve(config.objective, config.rollout.max_response_tokens)
    hf = HFConfig.read(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as stack:
        if partition.rank == 0:
            stack.enter_context(beat_for_trainers(control.store))
            stack.enter_context(ExternalEngines(config, control.store, control.generation, control.keys))
            stack.callback(request_stop, control.store, "the trainers have ended")
        groups = start_trainers(layout, partition.rank, control.store, config.cluster.timeout_s, config.run.seed)
        found = _find(config, run_dir)
        newest, policy = found.path, Policy(config, hf, groups, objective, goes_on=found.path is not None)
        checkpoints, progress = _resume(config, run_dir, policy, newest)
        report = stack.enter_context(Reporter(config, run_dir, groups, progress.step + 1 if newest else 0))
        report.say(banner({"layout": f"{layout.describe()} + {describe(config)}", "objective":
                           objective.describe(), "model": f"{hf.family} {config.model.path}",
                           "implementation": policy.chunks[0].implementation, "resumed": str(newest or "no")}))
        for wrong in found.passed_over:
            report.say(f"warning: {wrong}; the one before is taken")
        for key, (before, now) in checkpoints.changed.items() if newest else ():
            report.say(f"changed since {newest.name}: {key} was {before}, is {now}")
        if partition.rank == 0:
            _prepare_directories(config, run_dir)
            forget_after(run_dir, progress.step)
        meet = Meeting(control.store, partition.trainers)
        parts = Trainer(config, run_dir, control, groups, objective, policy, meet, checkpoints, report, progress,
                        tokenizer.pad_token_id or 0, newest)
        parts.source = _from_files(parts) if config.debug.replay_experience else _from_engines(stack, parts, tokenizer)
        yield parts
        dist.barrier()
    dist.destroy_process_group()  # not after a failure: peers may be gone, and waiting for them would hide it


def _find(config: Config, run_dir: Path) -> Found:
    """The checkpoint that the run goes on from; none where nothing is trained."""
    if config.debug.rollout_only:
        return Found()
    if not config.checkpoint.resume and (earlier := whole(run_dir / "checkpoints")):
        raise UserMistake(f"{earlier[-1]} is of an earlier run", "run.dir",
                          "use another directory, remove that run, or set checkpoint.resume: true")
    return find(run_dir / "checkpoints")


def _resume(config: Config, run_dir: Path, policy: Policy, newest: Path | None) -> tuple[Checkpoints | None, Progress]:
    """The run's checkpoints (None where nothing is trained), and how far it is once `newest` is loaded."""
    if config.debug.rollout_only:
        return None, Progress()
    checkpoints = Checkpoints(
        run_dir / "checkpoints", config.checkpoint.keep, policy.optimizer,
        {"model": policy.hf.raw, "objective": policy.objective.describe()},
        config.model_dump(mode="json", exclude={"run": {"dir", "steps"}, "observe": True, "eval": True, "debug": True}),
        keep_every=config.checkpoint.keep_every,
        fixed=(lambda key: False) if config.checkpoint.allow_changes else is_fixed)
    progress = checkpoints.load(newest, verify=False) if newest else Progress()
    policy.pace.resume(progress.costs)
    policy.resume_collapse(progress.collapse)
    return checkpoints, progress


def _from_files(parts: Trainer) -> Source:
    """Samples that an earlier run has written."""
    folder = parts.config.debug.replay_experience
    for key, (before, now) in differences(folder, parts.config.model_dump(mode="json")).items():
        parts.report.say(f"warning: {folder} was sampled with {key} {before}, now it is {now}")
    return Source(ReplayBuffer(Path(folder), parts.groups, parts.policy.hf.vocab))


def _from_engines(stack: ExitStack, parts: Trainer, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Samples by the run's engines; waits until they are up."""
    config, control, groups, policy = parts.config, parts.control, parts.groups, parts.policy
    kept = _fit_held(parts)
    draws = Draws(parts.progress.unfinished, parts.progress.position)
    sampling = _sampling(stack, parts, draws, kept, tokenizer) if groups.is_leader else None
    generator = sampling.generator if sampling else None
    fleet = _fleet(config, control) if dist.get_rank() == 0 else None
    if fleet is not None:
        fleet.wait_ready(config.cluster.start_timeout_s, lambda up, of: parts.report.say(f"engines up: {up} of {of}"))
    parts.meet()
    address = address_towards(config.rollout.urls, control.address)
    publisher = WeightPublisher(policy.chunks, policy.hf, config, address=address, generation=control.generation,
                                fleet=fleet)
    stack.callback(publisher.close)
    dispatcher = fleet and Dispatcher(config, control.store, draws, parts.progress.held, joined=publisher.behind,
                                      stops=(parts.run_dir / STOP).exists, saves=parts.save_overdue)
    course = Course(Announcements(control.store), publisher.catch_up, dispatcher, generator,
                    parts.report.heartbeat.beat)
    buffer = ExperienceBuffer(generator and generator.take, course.decide, groups, _term_names(config),
                              config.rollout.max_lag, count_names(config), metrics)
    return Source(buffer, course, publisher, sampling, fleet)


def _sampling(stack: ExitStack, parts: Trainer, draws: Draws, kept: list[int], tokenizer: PreTrainedTokenizerBase
              ) -> Sampling:
    """What a leader samples with; `kept` as `_fit_held` returns it."""
    config, control, groups = parts.config, parts.control, parts.groups
    score, environments = _scoring(stack, config, parts.objective, tokenizer)
    prompts = stack.enter_context(PromptStream(config.data, tokenizer, config.run.seed, start=draws.position))
    generator = Generator(
        config, prompts, _fleet(config, control), control.store, draws, generation=control.generation,
        leader_index=groups.dp, leaders=groups.layout.data, vocab_size=parts.policy.hf.vocab,
        decode=decoder(tokenizer), score=score, keep=has_signal if parts.objective.dynamic_sampling else None,
        environments=environments)
    stack.callback(generator.close)
    generator.restore(_held(parts, kept, prompts))
    sets = [(chosen.name or Path(chosen.path).stem, chosen, load_eval_set(chosen, tokenizer, config.data))
            for chosen in config.eval.sets]
    return Sampling(prompts, generator, sets)


def _fit_held(parts: Trainer) -> list[int]:
    """Places of those of the checkpoint's held groups that can be trained on; the same on every trainer.

    After a change of rollout.max_lag or data.prompts_per_step that need not be all: the prompts of the others are among
    `parts.progress.unfinished` then, so they are sampled again.
    """
    config, progress = parts.config, parts.progress
    lag, held = config.rollout.max_lag, progress.held
    kept = fitting(held, config.data.prompts_per_step, progress.step, lag)
    if len(kept) == len(held):
        return kept
    positions: dict[int, int] = {}
    for path in _held_files(parts):
        positions |= read_positions(path)
    again = [positions[place] for place in set(range(len(held))) - set(kept)]
    parts.progress = replace(progress, held=tuple(held[place] for place in kept),
                             unfinished=tuple(sorted((*progress.unfinished, *again))))
    old = sum(version + lag < progress.step for version in held)
    parts.report.say(f"warning: {len(again)} of the {len(held)} groups that were sampled ahead are dropped and their "
                     f"prompts sampled again: {old} are older than rollout.max_lag ({lag}) allows, {len(again) - old} "
                     "would be by the time they are trained on")
    return kept


def _held_files(parts: Trainer) -> list[Path]:
    return sorted(parts.resumed.glob("held.*.safetensors")) if parts.resumed else []


def _held(parts: Trainer, kept: list[int], prompts: PromptStream) -> dict[int, Group]:
    """This leader's share of the groups that an earlier life had finished, by their numbers."""
    found: dict[int, Group] = {}
    for path in _held_files(parts):
        found |= read_groups(path, prompts.at)
    return {number: found[place] for number, place in zip(held_numbers(len(kept)), kept, strict=True)
            if place % parts.groups.layout.data == parts.groups.dp}


def _scoring(stack: ExitStack, config: Config, objective: Objective, tokenizer: PreTrainedTokenizerBase
             ) -> tuple[Score | None, Environments | None]:
    """What scores single answers, and what has conversations of several turns; None where the run has none of them."""
    score = stack.enter_context(RewardPool(config.reward)).score_group if config.reward.terms else None
    if not config.environments:
        return score, None
    return score, Environments(config, tokenizer, objective, stop_ids=stop_token_ids(config.model.path, tokenizer),
                               score=score)


def _fleet(config: Config, control: Control) -> Fleet:
    return Fleet.from_config(config, control.store, control.keys)


def _term_names(config: Config) -> list[str]:
    return term_keys([Term(t.name, t.weight, t.source, t.options) for t in config.reward.terms])


def _prepare_directories(config: Config, run_dir: Path) -> None:
    """What is there from the start: the directory of timelines, and of experiences with the config they come from."""
    if config.observe.trace_steps:
        _make_directory(run_dir / "traces")
    if config.debug.dump_experience:
        _make_directory(Path(config.debug.dump_experience))
        write_config(config.debug.dump_experience, config.model_dump(mode="json"))


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"the directory cannot be made: {error.strerror}", str(path), "remove what is in its way"
                          ) from error
