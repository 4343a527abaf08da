#!/usr/bin/env bash
# Trains on a Slurm cluster:
#   sbatch --nodes=4 --gpus-per-node=8 slurm/train_moe.sh CONFIG [key.path=value ...]
# Submit from the root of the repository. One task a node runs launch/torchrun.sh; node numbers follow the allocation,
# so ranks do too: trainers come first (cluster.trainers), then rollout ranks (cluster.rollouts), both spread evenly
# over the nodes' processes.
#
# Environment (all optional):
#   MEGARL_VENV      virtual environment on a file system that all nodes see (default: the active one, else .venv)
#   MASTER_PORT      rendezvous port on the first node (default: 20000 + job id modulo 10000)
#   CONTAINER_ARGS   further arguments of srun, one string, for example
#                    "--container-image=/images/megarl.sqsh --container-mounts=$PWD --container-workdir=$PWD"
#   NPROC_PER_NODE   ranks a node, or a number for each node: 8,8,4 (default: all ranks divided by the nodes)
# Everything else that is set at submission reaches the ranks too (NCCL_*, GLOO_SOCKET_IFNAME, ...).
# The job's exit status is that of launch/torchrun.sh: 64 for a mistake to correct, 75 for a fault of the machine.
#SBATCH --job-name=megarl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch [options] slurm/train_moe.sh CONFIG [key.path=value ...]" >&2
    exit 64
fi
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}"

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# the address that Slurm itself uses: a node's name need not resolve on the other nodes
address="$(scontrol -o show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
export NNODES="$SLURM_NNODES"
export MASTER_ADDR="${address:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

IFS=' ' read -r -a container <<<"${CONTAINER_ARGS:-}"
on_nodes() { # NUMBER COMMAND...: one task a node, in the container if there is one
    local number="$1"
    shift
    # one task a node is all of the node's ranks: they need all its cores, not the one that a task is bound to
    srun --kill-on-bad-exit=1 --cpu-bind=none --nodes="$number" --ntasks="$number" --ntasks-per-node=1 \
        "${container[@]}" "$@"
}

checked="$(on_nodes 1 bash launch/torchrun.sh --check "$@")" # a mistake ends the job here, told once
run_dir="$(sed -n 's/^run directory: //p' <<<"$checked")"
echo "job $SLURM_JOB_ID on $SLURM_NNODES nodes ($SLURM_JOB_NODELIST), node 0 is $MASTER_ADDR:$MASTER_PORT"
rm -f "$run_dir/exit.json"
status=0
# shellcheck disable=SC2016 # each task expands this for itself
on_nodes "$SLURM_NNODES" bash -c 'NODE_RANK=$SLURM_NODEID exec bash launch/torchrun.sh "$@"' torchrun.sh "$@" ||
    status=$?
if [ "$status" -ne 0 ] && [ -f "$run_dir/exit.json" ]; then # srun tells the highest status of the tasks
    status="$(sed -n 's/.*"status": \([0-9]*\).*/\1/p' "$run_dir/exit.json")"
fi
exit "$status"
