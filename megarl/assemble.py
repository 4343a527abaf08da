"""Builds the parts of a trainer rank and takes them down again; `train.py` says what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.checkpoint.hf_export import save_hf
from megarl.checkpoint.state import Checkpoints, Progress
from megarl.cluster.groups import Groups, start_trainers
from megarl.cluster.partition import Partition
from megarl.cluster.store import Control, Meeting
from megarl.config.layout import Layout
from megarl.config.schema import Config, EvalSetConfig
from megarl.data.buffer import ExperienceBuffer, Taken
from megarl.data.dump import Recorded, differences, write_config, write_part
from megarl.data.prompts import PromptStream, load_eval_set
from megarl.data.replay import ReplayBuffer
from megarl.data.sample import Group, Prompt
from megarl.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from megarl.errors import UserMistake
from megarl.model.hf_config import HFConfig
from megarl.objective.advantages import has_signal
from megarl.objective.recipes import Objective, resolve
from megarl.observe.console import banner
from megarl.observe.report import Reporter
from megarl.pipeline import trace
from megarl.pipeline.trace import Span
from megarl.reward.pool import RewardPool
from megarl.reward.registry import Term, term_keys
from megarl.rollout.dispatch import Decision, Dispatcher, Draws, wait_for_decision
from megarl.rollout.environments.groups import Environments, Score, count_names, metrics
from megarl.rollout.evaluate import evaluate
from megarl.rollout.external import ExternalEngines, address_towards
from megarl.rollout.fleet import Fleet, beat_for_trainers, request_stop
from megarl.rollout.generate import Generator
from megarl.rollout.ledger import Announcements
from megarl.rollout.protocol import format_version
from megarl.rollout.records import write_rollouts
from megarl.sync.publish import WeightPublisher
from megarl.update.experience import Experience, Minibatch
from megarl.update.gap import watch_gap
from megarl.update.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Sampling:
    """What only leaders have: prompts, rewards, generation, held-out sets."""

    prompts: PromptStream
    generator: Generator
    sets: list[tuple[str, EvalSetConfig, list[Prompt]]]


@dataclass
class Course:
    """What this trainer has to do with the sampling of training groups, beside taking them.

    Attributes:
        ear: what trainer 0 announces.
        dispatcher: on trainer 0.
        generator: on leaders.
    """

    ear: Announcements
    dispatcher: Dispatcher | None
    generator: Generator | None

    def open(self, step: int, version: str) -> None:
        """Let `step` be sampled by the weights `version`, which the engines have."""
        if self.dispatcher is not None:
            self.dispatcher.open(step, version)

    def hold(self) -> None:
        """Let what is under way end, and nothing begin, until `open`."""
        if self.dispatcher is not None:
            self.dispatcher.hold(self._alive)

    def decide(self, step: int) -> Decision:
        """What all trainers do next for `step`."""
        if self.dispatcher is not None:
            self.dispatcher.decide(step, self._alive)
        return wait_for_decision(self.ear, self._alive)

    def _alive(self) -> None:
        if self.generator is not None:
            self.generator.check()


@dataclass
class Source:
    """Where samples come from: engines, or files that another run has written, which need the buffer only.

    Attributes:
        buffer: hands out experiences.
        course: of the sampling.
        publisher: gives the engines their weights.
        sampling: on leaders.
        fleet: the engines; on trainer 0.
    """

    buffer: ExperienceBuffer | ReplayBuffer
    course: Course | None = None
    publisher: WeightPublisher | None = None
    sampling: Sampling | None = None
    fleet: Fleet | None = None


@dataclass
class Trainer:
    """One trainer rank's parts. Every method is collective over the trainers.

    Attributes:
        config, run_dir, groups, objective, policy: the run.
        progress: how far it is.
        version: of the weights the engines hold.
        meet: waits for all trainers, however long some take.
        source: where samples come from.
        checkpoints: None where nothing is trained (debug.rollout_only).
        report: metrics and console (written by trainer 0).
    """

    config: Config
    run_dir: Path
    control: Control
    groups: Groups
    objective: Objective
    policy: Policy
    meet: Meeting
    source: Source
    checkpoints: Checkpoints | None
    report: Reporter
    progress: Progress
    pad_token: int
    version: str = ""

    def take(self) -> Taken:
        """The samples of the next step; written, for people to read and for a replay, if asked to."""
        taken, debug, step = self.source.buffer.take(self.progress.step), self.config.debug, self.progress.step + 1
        if taken.problems:
            print(taken.problems, flush=True)
        every = self.config.observe.rollouts
        if taken.groups and every and step % every == 0:  # the number that the step's metrics will have
            write_rollouts(self.run_dir, step, dist.get_rank(), taken.groups)
        if debug.dump_experience and taken.local is not None:
            write_part(debug.dump_experience, step, self.groups.dp, self.groups.layout.data, Recorded(
                taken.local, self.version, taken.position, taken.unfinished, taken.metrics))
        return taken

    def experience(self, taken: Taken) -> Experience:
        """Pack a step's samples and move them to the ranks that train them."""
        pace = self.policy.pace
        found = Experience.build(taken, self.progress.step, self.config, self.objective, self.groups, pace,
                                 self.pad_token, self.policy.replay)
        for note in pace.news():
            self.report.say(f"pipeline: {note}")
        oversized = sum(len(minibatch.plan.oversized) for minibatch in found.minibatches)
        if oversized:
            self.report.say(f"warning: {oversized} sequences are longer than batch.max_tokens "
                            f"({self.config.batch.max_tokens}); each has a micro-batch of its own")
        return found

    def watch_gap(self, experience: Experience) -> None:
        """Compare the engines' log-probs with the trainer's; warn or end the run if they disagree too much."""
        metrics, warning = watch_gap(experience, self.config, self.groups, self.progress.step + 1)
        self.report.add(metrics)
        if warning:
            self.report.say(f"warning: {warning}")

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """One optimizer step; its timeline is written if the step is one of observe.trace_steps."""
        step = self.progress.step + 1
        traced = step in self.config.observe.trace_steps
        stats = self.policy.update(minibatch, timed=traced)
        while self.policy.news:
            self.report.say(f"warning: {self.policy.news.pop(0)}")
        if traced and self.policy.spans:
            speaks = self.groups.tp == self.groups.cp == self.groups.dp == 0
            spans: list[list[Span]] = [[]] * dist.get_world_size()
            dist.all_gather_object(spans, self.policy.spans if speaks else [])
            path = self.run_dir / "traces" / f"step_{step:08d}_update_{self.policy.optimizer.updates}.jsonl"
            if dist.get_rank() == 0:
                trace.write(path, sum(spans, []))
            self.report.say(f"timeline; draw it: python tools/schedule.py draw --trace {path} --out timeline.html")
        return stats

    def publish(self) -> None:
        """Give the engines the present weights; their version is the number of finished steps."""
        self.version = format_version(self.control.generation, self.progress.step)
        if self.source.publisher is None:
            return
        if self.config.rollout.on_update == "finish":
            self.source.course.hold()
            self.meet()
        sent = self.source.publisher.publish(self.version)
        self.source.course.open(self.progress.step, self.version)
        self.report.add({"sync/megabytes": sent.bytes / 1e6, "sync/engines": len(sent.engines)}
                        | (self.source.fleet.metrics() if self.source.fleet else {}))

    def evaluate(self) -> None:
        """Sample and score the held-out sets."""
        def record(name: str, found: list[Group]) -> None:
            if self.config.observe.rollouts:
                write_rollouts(self.run_dir, self.progress.step, dist.get_rank(), found, prefix=f"eval_{name}_")

        sampling = self.source.sampling
        if sampling is None:
            self.meet()
        else:
            self.report.add(evaluate(sampling.sets, sampling.generator, self.groups, self.config.run.seed, self.version,
                                     record, self.meet))

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due with so many steps finished; 0 is never."""
        return bool(every) and self.progress.step % every == 0

    def save(self) -> None:
        """Write a checkpoint of the progress."""
        self.checkpoints.save(replace(self.progress, costs=self.policy.pace.state(),
                                      collapse=self.policy.collapse.state()))

    def finish(self) -> None:
        """The last checkpoint, the reward curve and the Hugging Face export."""
        if not self.due(self.config.checkpoint.every):
            self.save()
        self.report.draw()
        if self.source.sampling is not None:
            for source in self.source.sampling.prompts.report():
                self.report.say(source.describe() if source.dropped else f"{source.name}: no prompt dropped")
        if self.config.checkpoint.export:
            save_hf(self.policy.chunks, self.policy.hf, self.groups.layout, self.config.model.path,
                    self.run_dir / "export")
            self.report.say(f"exported to {self.run_dir / 'export'}")


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
        policy = Policy(config, hf, groups, objective)
        checkpoints, newest, progress = _resume(config, run_dir, policy)
        report = stack.enter_context(Reporter(config, run_dir, groups, progress.step + 1 if newest else 0))
        report.say(banner({"layout": f"{layout.describe()} + {partition.rollouts} rollout", "objective":
                           objective.describe(), "model": f"{hf.family} {config.model.path}",
                           "implementation": policy.chunks[0].implementation, "resumed": str(newest or "no")}))
        for key, (before, now) in checkpoints.changed.items() if newest else ():
            report.say(f"changed since {newest.name}: {key} was {before}, is {now}")
        if partition.rank == 0:
            _prepare_directories(config, run_dir)
        meet = Meeting(control.store, partition.trainers)
        source = (_from_files(config, groups, hf, report) if config.debug.replay_experience else
                  _from_engines(stack, config, control, policy, tokenizer, report, progress, meet))
        yield Trainer(config, run_dir, control, groups, objective, policy, meet, source, checkpoints, report, progress,
                      tokenizer.pad_token_id or 0)
        dist.barrier()
    dist.destroy_process_group()  # not after a failure: peers may be gone, and waiting for them would hide it


def _resume(config: Config, run_dir: Path, policy: Policy) -> tuple[Checkpoints | None, Path | None, Progress]:
    """The run's checkpoints (None where nothing is trained), the one that it goes on from, and how far it is."""
    if config.debug.rollout_only:
        return None, None, Progress()
    checkpoints = Checkpoints(
        run_dir / "checkpoints", config.checkpoint.keep, policy.optimizer,
        {"model": policy.hf.raw, "objective": policy.objective.describe(), "layout": policy.groups.layout.describe()},
        config.model_dump(mode="json", exclude={"run": {"dir", "steps"}, "observe": True, "eval": True, "debug": True}))
    newest = checkpoints.newest()
    if newest and not config.checkpoint.resume:
        raise UserMistake(f"{newest} is of an earlier run", "run.dir",
                          "use another directory, remove that run, or set checkpoint.resume: true")
    progress = checkpoints.load(newest) if newest else Progress()
    policy.pace.resume(progress.costs)
    policy.resume_collapse(progress.collapse)
    return checkpoints, newest, progress


def _from_files(config: Config, groups: Groups, hf: HFConfig, report: Reporter) -> Source:
    """Samples that an earlier run has written."""
    folder = config.debug.replay_experience
    for key, (before, now) in differences(folder, config.model_dump(mode="json")).items():
        report.say(f"warning: {folder} was sampled with {key} {before}, now it is {now}")
    return Source(ReplayBuffer(Path(folder), groups, hf.vocab))


def _from_engines(stack: ExitStack, config: Config, control: Control, policy: Policy,
                  tokenizer: PreTrainedTokenizerBase, report: Reporter, progress: Progress, meet: Meeting) -> Source:
    """Samples by the run's engines; waits until they are up."""
    groups, hf, objective = policy.groups, policy.hf, policy.objective
    sampling, draws = None, Draws(progress.unfinished, progress.position)
    if groups.is_leader:
        score, environments = _scoring(stack, config, objective, tokenizer)
        prompts = stack.enter_context(PromptStream(config.data, tokenizer, config.run.seed, start=progress.position))
        generator = Generator(
            config, prompts, _fleet(config, control), control.store, draws, generation=control.generation,
            leader_index=groups.dp, leaders=groups.layout.data, vocab_size=hf.vocab, decode=decoder(tokenizer),
            score=score, keep=has_signal if objective.dynamic_sampling else None, environments=environments)
        stack.callback(generator.close)
        sets = [(chosen.name or Path(chosen.path).stem, chosen, load_eval_set(chosen, tokenizer, config.data))
                for chosen in config.eval.sets]
        sampling = Sampling(prompts, generator, sets)
    fleet = _fleet(config, control) if dist.get_rank() == 0 else None
    if fleet is not None:
        fleet.wait_ready(config.cluster.start_timeout_s, lambda up, of: report.say(f"engines up: {up} of {of}"))
    meet()
    address = address_towards(config.rollout.urls, control.address)
    publisher = WeightPublisher(policy.chunks, hf, config, address=address, generation=control.generation,
                                fleet=fleet)
    stack.callback(publisher.close)
    course = Course(Announcements(control.store), Dispatcher(config, control.store, draws) if fleet else None,
                    sampling.generator if sampling else None)
    buffer = ExperienceBuffer(sampling.generator.take if sampling else None, course.decide, groups,
                              _term_names(config), config.rollout.max_lag, count_names(config), metrics)
    return Source(buffer, course, publisher, sampling, fleet)


def _scoring(stack: ExitStack, config: Config, objective: Objective, tokenizer: PreTrainedTokenizerBase
             ) -> tuple[Score | None, Environments | None]:
    """What scores single answers, and what has conversations of several turns; None where the run has none of them."""
    score = stack.enter_context(RewardPool(config.reward)).score_group if config.reward.terms else None
    if not config.environments:
        return score, None
    return score, Environments(config, tokenizer, objective, stop_ids=stop_token_ids(config.model.path, tokenizer),
                               decode=decoder(tokenizer), score=score)


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
