#!/usr/bin/env bash
# Trains: bash launch/torchrun.sh CONFIG [key.path=value ...]
# The config is checked first. Exit status 64: a mistake to correct; 75: the machine's fault, may be retried.
#
# One node: nothing else is needed; the config says how many ranks there are, and a free port is taken.
#
# Several nodes: the same line on each of them, with
#   NNODES=3 NODE_RANK=0|1|2      how many there are, and which one this is; node 0 has the first trainers
#   MASTER_ADDR MASTER_PORT       node 0's address and a port that is free there, the same on all nodes
#   NPROC_PER_NODE=8,8,4          ranks of each node, where they differ
# Rank numbers follow node numbers: neighbours in a ring of ranks are neighbours in the network if the nodes are.
#
# Trainers and rollout ranks started apart, so that a lost rollout node ends nothing but itself: on the trainers' nodes
#   MEGARL_PARTITION=trainers     with NNODES, NODE_RANK and NPROC_PER_NODE of the trainers' nodes alone
# and on the rollout ranks' nodes
#   MEGARL_PARTITION=rollouts     with those of the rollout ranks' nodes; MASTER_ADDR and MASTER_PORT as the trainers',
#                                 whose node 0 also serves the next port, where the partitions meet. A node of rollout
#                                 ranks that died is started again by the same line, while the trainers go on.
#   MEGARL_LIFE=NAME              the same on all nodes and another at each start: ranks of different names never meet
#
# Restarts are nobody's business here: --max-restarts is 0, and the same command line goes on from the newest checkpoint.
# slurm/train_moe.sh is the one place that starts again what has failed.
#
# What is set for the ranks, unless it is set already:
#   CUDA_DEVICE_MAX_CONNECTIONS=1   Megatron-core overlaps tensor-parallel communication by the order of launches
#   PYTHONUNBUFFERED=1              what a rank said before it died is in its log
# What you may have to set:
#   OMP_NUM_THREADS                 threads of each rank on CPU (torchrun's default: 1)
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the interface of the fabric, where a host has several; the wrong one hangs.
#                                   gloo (CPU ranks) takes that of the host's name, which is often 127.0.1.1
#   NCCL_IB_HCA                     the InfiniBand adapters to use, where some are for storage
#   NCCL_DEBUG=INFO                 what NCCL chose; into each rank's log
#   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   fewer failures for want of memory in fragments
#   HF_HOME                         the cache of tokenizers and models, if the home directory is small
set -euo pipefail
# shellcheck source=launch/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
if ! "$python" -c 'import pydantic, yaml' 2>/dev/null; then
    printf 'error: %s cannot run megarl\n  remedy: bash launch/setup.sh\n' "$python" >&2
    exit 64
fi
exec "$python" -m megarl.launch "$@"
