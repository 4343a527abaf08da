"""The world cut in two by rank: trainers first, then rollout ranks. A rank's role follows from its number alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

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

        Raises:
            UserMistake: the variables are missing, or the world is not trainers + rollouts.
        """
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        world = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS"))
        if rank is None or world is None:
            raise UserMistake("RANK and WORLD_SIZE are not set", "environment",
                              "start with launch/torchrun.sh, torchrun or srun")
        need = cluster.trainers + cluster.rollouts
        if int(world) != need:
            raise UserMistake(
                f"the world has {world} ranks, but cluster.trainers {cluster.trainers} + cluster.rollouts "
                f"{cluster.rollouts} = {need}", "cluster", f"start {need} ranks, or change the two keys")
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        return cls(int(rank), int(world), int(local), cluster.trainers, cluster.rollouts)

    @property
    def is_trainer(self) -> bool:
        """Whether this rank trains; otherwise it supervises engines."""
        return self.rank < self.trainers

    @property
    def rollout_index(self) -> int:
        """Number of this rank within the rollout partition (negative on a trainer)."""
        return self.rank - self.trainers
