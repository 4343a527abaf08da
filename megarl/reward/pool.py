"""Scoring samples in worker processes, under a time limit, with every failure counted."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.config.schema import RewardConfig
from megarl.data.sample import Sample
from megarl.errors import MachineFault, UserMistake
from megarl.reward.process import Outcome, Worker
from megarl.reward.registry import PromptView, Term, term_keys

EXAMPLES = 5  # failures that a report tells in full


@dataclass
class ScoreReport:
    """What happened to a number of samples.

    Attributes:
        samples: how many were scored or tried.
        failed: samples with a failed term.
        dropped: failed samples left without a reward (`reward.on_error: drop`); the other failed ones got
            `reward.error_value`.
        failures: (term, kind of failure) -> count; kinds as in `process.Outcome`.
        examples: the first few failures in full.
    """

    samples: int = 0
    failed: int = 0
    dropped: int = 0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, other: ScoreReport) -> None:
        """Take in the report on other samples."""
        self.samples += other.samples
        self.failed += other.failed
        self.dropped += other.dropped
        self.failures.update(other.failures)
        self.examples = (self.examples + other.examples)[:EXAMPLES]

    def describe(self) -> str:
        """The failures in a few lines; empty if there were none."""
        if not self.failed:
            return ""
        kinds = ", ".join(f"{term} {kind} x{count}" for (term, kind), count in sorted(self.failures.items()))
        head = f"reward failed for {self.failed} of {self.samples} samples ({self.dropped} dropped): {kinds}"
        return "\n".join([head, *(f"  {example}" for example in self.examples)])


class _Job(NamedTuple):
    future: Future[list[Outcome]]
    terms: list[int]
    sample: Sample


class RewardPool:
    """Worker processes that score samples; usable from several threads at once.

    Each worker has a thread here that feeds it, starts it and replaces it. Use as a context manager, or call `close`.

    Args:
        config: terms, number of workers, time limit of a sample in seconds, what happens to failed samples.
        start_timeout_s: until a worker has imported its functions.

    Raises:
        UserMistake: a function is unknown, lacks a package or does not take its options; or `on_error: value`
            without `error_value`.
    """

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 120.0) -> None:
        if config.on_error == "value" and config.error_value is None:
            raise UserMistake("on_error is value but there is no value", "reward.error_value", "set it to a number")
        self._config = config
        self._terms = [Term(t.name, t.weight, t.source, t.options) for t in config.terms]
        self._keys = term_keys(self._terms)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: Exception | None = None
        self._workers = [Worker(self._terms, start_timeout_s) for _ in range(config.workers)]
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, args=(worker, started), daemon=True, name="reward")
                         for worker in self._workers]
        for thread in self._threads:
            thread.start()
        problems = [problem for problem in (started.get() for _ in self._threads) if problem is not None]
        if problems:
            self.close()
            raise problems[0]

    def score(self, samples: Sequence[Sample]) -> ScoreReport:
        """Set `reward` and `reward_terms` of each sample; returns when all are done.

        A sample's reward is the weighted sum of the terms that apply to its source. If one of them fails it is None
        (`on_error: drop`) or `error_value`; `reward_terms` has the unweighted values of the terms that did not fail.

        Raises:
            UserMistake: no term applies to a sample's source.
            MachineFault: a worker could not be replaced, or the pool is closed.
        """
        jobs = [self._submit(sample) for sample in samples]
        return self._settle([(job, job.future.result()) for job in jobs])

    async def score_group(self, samples: Sequence[Sample]) -> ScoreReport:
        """As `score`, for an asyncio loop."""
        jobs = [self._submit(sample) for sample in samples]
        results = await asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
        return self._settle(list(zip(jobs, results, strict=True)))

    def close(self) -> None:
        """End all workers, hanging ones too; unfinished calls of `score` raise MachineFault."""
        self._break(MachineFault("the reward pool is closed"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, sample: Sample) -> _Job:
        source = sample.prompt.source
        terms = [number for number, term in enumerate(self._terms) if term.source in ("", source)]
        if not terms:
            raise UserMistake(f"no reward term applies to the data source {source!r}", "reward.terms",
                              f"add a term with source: {source}, or one without a source")
        job = _Job(Future(), terms, sample)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._jobs.put(job)
        return job

    def _serve(self, worker: Worker, started: queue.SimpleQueue[Exception | None]) -> None:
        """The life of one worker's thread."""
        try:
            worker.start()
            started.put(None)
        except Exception as error:
            started.put(error)
            return
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            sample, prompt = job.sample, job.sample.prompt
            view = PromptView(prompt.text, prompt.source, prompt.extra, len(sample.response_ids), sample.finish)
            try:
                outcomes = worker.run(job.terms, sample.text, prompt.label, view, self._config.timeout_s)
                if self._closed is not None:  # the worker was killed under the job
                    job.future.set_exception(self._closed)
                else:
                    job.future.set_result(outcomes)
                if not worker.running and self._closed is None:
                    worker.start()
            except Exception as error:
                if not job.future.done():
                    job.future.set_exception(error)
                self._break(error)
        worker.stop()

    def _break(self, reason: Exception) -> None:
        """Take no more jobs, fail the waiting ones, end the workers."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            waiting = []
            while not self._jobs.empty():
                waiting.append(self._jobs.get())
            for _ in self._threads:
                self._jobs.put(None)
        for job in waiting:
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_exception(reason)
        for worker in self._workers:
            worker.kill()

    def _settle(self, results: Sequence[tuple[_Job, list[Outcome]]]) -> ScoreReport:
        """Write the outcomes into the samples."""
        report = ScoreReport(samples=len(results))
        for job, outcomes in results:
            sample, failed = job.sample, False
            sample.reward_terms = {}
            for number, outcome in zip(job.terms, outcomes, strict=True):
                key = self._keys[number]
                if outcome.value is not None:
                    sample.reward_terms[key] = outcome.value
                    continue
                failed = True
                report.failures[key, outcome.kind] += 1
                if len(report.examples) < EXAMPLES:
                    report.examples.append(f"{key} {outcome.kind} on sample ({sample.prompt.position}, {sample.n}): "
                                           f"{outcome.text}")
            if failed:
                report.failed += 1
                report.dropped += self._config.on_error == "drop"
                sample.reward = self._config.error_value if self._config.on_error == "value" else None
            else:
                sample.reward = sum(self._terms[number].weight * sample.reward_terms[self._keys[number]]
                                    for number in job.terms)
        return report
