"""The ranks cut in two: trainers first, then rollout ranks. A rank's role follows from its number alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.cluster.nodes import CONTROL, FIRST_RANK
from megarl.config.schema import ClusterConfig
from megarl.errors import UserMistake


@dataclass(frozen=True)
class Partition:
    """This process's place in the world.

    Attributes:
        rank, world: global rank and number of ranks; ranks [0, trainers) train, the rest supervise engines.
        local_rank: number on this host.
        trainers, rollouts: sizes of the two partitions.
    """

    rank: int
    world: int
    local_rank: int
    trainers: int
    rollouts: int

    @classmethod
    def from_env(cls, cluster: ClusterConfig) -> Partition:
        """Read RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them, or Slurm's task numbers under a plain srun.

        Where the partitions are started apart, torchrun's numbers are of a world of trainers only, or of some rollout
        ranks; the launcher says where that world begins.

        Raises:
            UserMistake: the variables are missing, or the world is not that of the config.
        """
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        world = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS"))
        if rank is None or world is None:
            raise UserMistake("RANK and WORLD_SIZE are not set", "environment",
                              "start with launch/torchrun.sh, torchrun or srun")
        need, local = cluster.trainers + cluster.rollouts, os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
        first = int(os.environ.get(FIRST_RANK, "0"))
        if CONTROL in os.environ and (first + int(world) > need if first else int(world) != cluster.trainers):
            raise UserMistake(f"a world of {world} ranks from rank {first} on is none of cluster.trainers "
                              f"{cluster.trainers} and cluster.rollouts {cluster.rollouts}", "cluster",
                              "start both partitions with the same config")
        if CONTROL not in os.environ and int(world) != need:
            raise UserMistake(
                f"the world has {world} ranks, but cluster.trainers {cluster.trainers} + cluster.rollouts "
                f"{cluster.rollouts} = {need}", "cluster", f"start {need} ranks, or change the two keys")
        return cls(first + int(rank), need, int(local or 0), cluster.trainers, cluster.rollouts)

    @property
    def is_trainer(self) -> bool:
        """Whether this rank trains; otherwise it supervises engines."""
        return self.rank < self.trainers

    @property
    def rollout_index(self) -> int:
        """Number of this rank within the rollout partition (negative on a trainer)."""
        return self.rank - self.trainers
