"""The main loop. Every rank runs this program: `torchrun -m megarl.train CONFIG.yaml [key.path=value ...]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.errors import UserMistake, run_main

if TYPE_CHECKING:
    from megarl.trainer import Trainer


def train(config: Config, trainer: Trainer) -> None:
    """Sample, score, learn, publish; until the run's steps are done.

    One step: take scored answers of the engines, which go on sampling meanwhile as far ahead as rollout.max_lag allows
    (Taken; the leaders have them, one for each data-parallel rank); a packing plan, computed by every rank from the
    same table, says who trains what, and the samples move there (Experience, its Minibatches and PackedBatches);
    log-probs with the weights as they are; advantages; one optimizer step for each minibatch; the new weights go to
    the engines.
    """
    report, policy = trainer.report, trainer.policy
    if trainer.progress.step >= config.run.steps:
        report.say(f"step {trainer.progress.step} of {config.run.steps} was reached before; nothing to train")
    trainer.publish()
    if trainer.progress.step == 0 and config.eval.before_start:
        trainer.evaluate()
        report.step(0)
    while trainer.progress.step < config.run.steps:
        with report.phases("rollout"):
            taken = trainer.take()
        if taken is None:
            break
        with report.phases("logprobs"):
            experience = trainer.experience(taken)
            for minibatch in experience.minibatches:
                policy.reference_logprobs(minibatch)
                policy.old_logprobs(minibatch)
            trainer.watch_gap(experience)
            experience.set_advantages()
        with report.phases("update"):
            updates = [trainer.update(minibatch) for minibatch in experience.passes()]
        trainer.progress = replace(trainer.progress, step=trainer.progress.step + 1, position=taken.position,
                                   unfinished=taken.unfinished)
        with report.phases("publish"):
            trainer.publish()
        if trainer.due(config.checkpoint.every) or taken.saves:
            with report.phases("checkpoint"):
                trainer.save()
        if trainer.due(config.eval.every):
            with report.phases("evaluate"):
                trainer.evaluate()
                report.draw()
        report.add(taken.metrics | experience.metrics())
        report.add_updates(updates)
        report.step(trainer.progress.step)
    trainer.finish()


def sample(config: Config, trainer: Trainer) -> None:
    """Sample, score and write, and train nothing (debug.rollout_only): versions count the steps, the weights stay."""
    report = trainer.report
    trainer.publish()
    while trainer.progress.step < config.run.steps:
        with report.phases("rollout"):
            taken = trainer.take()
        if taken is None:
            break
        trainer.progress = replace(trainer.progress, step=trainer.progress.step + 1)
        with report.phases("publish"):
            trainer.publish()
        report.add(taken.metrics)
        report.step(trainer.progress.step)
    trainer.settle()
    if trainer.progress.step < config.run.steps:
        return trainer.stop()
    report.heartbeat.beat("finished")


def main(argv: list[str]) -> None:
    """Load the config, find this rank's role, play it."""
    if not argv:
        raise UserMistake("no config given", "command line", "bash launch/torchrun.sh CONFIG.yaml [key.path=value ...]")
    config = load(argv[0], argv[1:])
    from megarl.cluster import device
    from megarl.cluster.partition import Partition
    from megarl.cluster.store import connect, farewell

    partition = Partition.from_env(config.cluster)
    if partition.is_trainer:
        device.prepare(config.cluster.device, partition.local_rank)  # before anything imports Megatron-core
    control = connect(partition, config.cluster)
    run_dir = Path(config.run.dir).absolute()
    if partition.is_trainer:
        from megarl.assemble import trainer

        with trainer(config, partition, control, run_dir) as parts:
            (sample if config.debug.rollout_only else train)(config, parts)
    else:
        from megarl.rollout.supervisor import supervise

        supervise(config, partition, control.store, run_dir, address=control.address, keys=control.keys)
    farewell(control, partition, config.cluster.lease_timeout_s)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
