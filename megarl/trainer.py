"""A trainer rank's part of the run, as the main loop calls it; `assemble.py` builds it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint.hf_export import save_hf
from megarl.checkpoint.state import Checkpoints, Progress
from megarl.cluster import device
from megarl.cluster.groups import Groups
from megarl.cluster.store import Control, Meeting
from megarl.config.schema import Config, EvalSetConfig
from megarl.data.buffer import ExperienceBuffer, Taken
from megarl.data.dump import Recorded, write_part
from megarl.data.groups_file import write_groups
from megarl.data.prompts import PromptStream
from megarl.data.replay import ReplayBuffer
from megarl.data.sample import Group, Prompt
from megarl.errors import MachineFault, write_exit
from megarl.objective.recipes import Objective
from megarl.observe.report import Reporter
from megarl.pipeline import trace
from megarl.pipeline.trace import Span
from megarl.rollout import evaluate
from megarl.rollout.course import Course
from megarl.rollout.fleet import Fleet
from megarl.rollout.generate import Generator
from megarl.rollout.protocol import format_version
from megarl.rollout.records import write_rollouts
from megarl.sync.publish import PublishReport, WeightPublisher
from megarl.update.experience import Experience, Minibatch
from megarl.update.gap import watch_gap
from megarl.update.guard import Guard
from megarl.update.policy import Policy

STOP = "STOP"  # name of the file in the run directory that asks a run to end after the step under way


@dataclass
class Sampling:
    """What only leaders have: prompts, rewards, generation, held-out sets."""

    prompts: PromptStream
    generator: Generator
    sets: list[tuple[str, EvalSetConfig, list[Prompt]]]


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
        checkpoints: None where nothing is trained (debug.rollout_only).
        report: metrics and console (written by trainer 0).
        resumed: the checkpoint that this life goes on from.
        source: where samples come from; set before the first step.
        taken: the samples of the step under way.
        guard: the alarm for leaps.
        saved_at: when a checkpoint was written last, or the run began; by time.monotonic().
    """

    config: Config
    run_dir: Path
    control: Control
    groups: Groups
    objective: Objective
    policy: Policy
    meet: Meeting
    checkpoints: Checkpoints | None
    report: Reporter
    progress: Progress
    pad_token: int
    resumed: Path | None = None
    source: Source | None = None
    version: str = ""
    saved_at: float = field(default_factory=time.monotonic)
    taken: Taken | None = None
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(self.config.guard)
        self.guard.resume(self.progress.guard)

    def take(self) -> Taken | None:
        """The samples of the next step; written, for people to read and for a replay, if asked to.

        None if the run is asked to stop, by a file STOP in its directory.
        """
        if self.checkpoints is not None and (saved := self.checkpoints.poll()):
            self.report.say(f"saved {saved}")
        if self.source.course is None and self._asked_to_stop():
            return None
        taken, debug, step = self.source.buffer.take(self.progress.step), self.config.debug, self.progress.step + 1
        if taken is None:
            return None
        self.taken = taken
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
        try:
            stats = self.policy.update(minibatch, timed=traced)
        except MachineFault as fault:  # a gradient norm that is not finite, on all trainers
            self._keep_samples()
            raise MachineFault(f"{fault}; the step's samples are in {self.run_dir / 'guard'}") from fault
        self._guard(stats)
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

    def _guard(self, stats: dict[str, float]) -> None:
        """Tell of a leap of the loss or gradient norm, keep the samples that made it, stop if that is asked for."""
        told, folder = self.guard.judge(self.progress.step, stats), self.run_dir / "guard"
        if not told:
            return
        kept = self.guard.wants_dump()
        if kept:
            self._keep_samples()
        self.report.say(f"warning: step {self.progress.step + 1}: {told}"
                        + (f"; the step's samples are in {folder}" if kept else ""))
        self.guard.raise_if_asked(told, str(folder))

    def _keep_samples(self) -> None:
        """Write the samples of the step under way to run.dir/guard, as debug.dump_experience does."""
        if self.taken.local is not None:
            write_part(self.run_dir / "guard", self.progress.step + 1, self.groups.dp, self.groups.layout.data,
                       Recorded(self.taken.local, self.version, self.taken.position, self.taken.unfinished,
                                self.taken.metrics))

    def publish(self) -> None:
        """Give the engines the present weights; their version is the number of finished steps."""
        self.version = format_version(self.control.generation, self.progress.step)
        if self.source.publisher is None:
            return
        publisher, course, pause = self.source.publisher, self.source.course, self.config.rollout.on_update
        if pause == "finish":
            course.hold()
        self._tell(publisher.finish())
        publisher.start(self.version, pause)
        if not self.config.sync.overlap:
            self._tell(publisher.finish())
        course.open(self.progress.step, self.version, publisher.done)

    def settle(self) -> None:
        """Wait until the engines have the weights that were published last."""
        if self.source.publisher is not None:
            self._tell(self.source.publisher.finish())

    def _tell(self, sent: PublishReport | None) -> None:
        """Metrics of a publish."""
        if sent is not None:
            self.report.add({"sync/megabytes": sent.bytes / 1e6, "sync/engines": len(sent.engines),
                             "sync/engines_lost": len(sent.lost), "seconds/pause": sent.paused_s}
                            | (self.source.fleet.metrics() if self.source.fleet else {}))
            for engine, why in sent.lost.items():
                self.report.say(f"warning: {engine.describe()} did not take the weights {sent.version}: {why}")

    def evaluate(self) -> None:
        """Sample and score the held-out sets."""
        def record(name: str, found: list[Group]) -> None:
            if self.config.observe.rollouts:
                write_rollouts(self.run_dir, self.progress.step, dist.get_rank(), found, prefix=f"eval_{name}_")

        sampling, course = self.source.sampling, self.source.course
        self.settle()
        if course is None:
            return
        mine = course.attend(sampling and (lambda: evaluate.answer(
            sampling.sets, sampling.generator, self.config.run.seed, self.version, record)), self.meet)
        if sampling is not None:
            self.report.add(evaluate.metrics(sampling.sets, mine, self.groups))

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due with so many steps finished; 0 is never."""
        return bool(every) and self.progress.step % every == 0

    def save_overdue(self) -> bool:
        """Whether the last checkpoint was written checkpoint.minutes ago, on this trainer's clock."""
        minutes = self.config.checkpoint.minutes
        return minutes is not None and time.monotonic() - self.saved_at > 60 * minutes

    def save(self) -> None:
        """Write a checkpoint of the progress."""
        self.saved_at = time.monotonic()
        progress = replace(self.progress, costs=self.policy.pace.state(), collapse=self.policy.collapse.state(),
                           guard=self.guard.state(), held=())
        held: dict[int, Group] = {}
        if self.source.course is not None:
            sampled, held = self.source.course.snapshot()
            progress = replace(progress, position=sampled.position, unfinished=tuple(sampled.unfinished),
                               held=tuple(sampled.issued))

        def write_held(folder: Path) -> list[Path]:
            if not held:
                return []
            write_groups(path := folder / f"held.{self.groups.dp}.safetensors", held)
            return [path]

        self.checkpoints.save(progress, write_held)
        if not self.config.checkpoint.background:
            self.checkpoints.finish()

    def finish(self) -> None:
        """The last checkpoint, the reward curve and, if the run has come to its end, the Hugging Face export."""
        self.settle()
        if not self.due(self.config.checkpoint.every):
            self.save()
        self.report.draw()
        self.checkpoints.finish()
        if self.progress.step < self.config.run.steps:
            return self.stop()
        if self.source.sampling is not None:
            for source in self.source.sampling.prompts.report():
                self.report.say(source.describe() if source.dropped else f"{source.name}: no prompt dropped")
        if self.config.checkpoint.export:
            save_hf(self.policy.chunks, self.policy.hf, self.groups.layout, self.config.model.path,
                    self.run_dir / "export")
            self.report.say(f"exported to {self.run_dir / 'export'}")
        self.report.heartbeat.beat("finished")

    def _asked_to_stop(self) -> bool:
        """Trainer 0's view of the file STOP, on all trainers."""
        asked = torch.tensor([(self.run_dir / STOP).exists()], dtype=torch.int32, device=device.current())
        dist.broadcast(asked, src=0)
        return bool(asked)

    def stop(self) -> None:
        """Obey a request to stop: it is taken away, and exit.json says that there is more to do."""
        if dist.get_rank() == 0:
            write_exit(self.run_dir, 0, "stopped on request")
            (self.run_dir / STOP).unlink(missing_ok=True)
        self.report.say(f"stopped on request after step {self.progress.step} of {self.config.run.steps}; start it "
                        "again to go on")
        self.report.heartbeat.beat("stopped")
