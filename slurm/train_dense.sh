#!/usr/bin/env bash
# Trains a dense model on a Slurm cluster, as train_moe.sh does a MoE model. What differs is in the config: no
# parallel.expert, and often both partitions on one node, each with some of its GPUs:
#   sbatch --nodes=1 --gpus-per-node=8 --time=12:00:00 slurm/train_dense.sh configs/qwen3_4b.yaml [key.path=value ...]
#SBATCH --job-name=megarl-dense
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@600
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch [options] slurm/train_dense.sh CONFIG [key.path=value ...]" >&2
    exit 64
fi
# Slurm runs a copy of this script from elsewhere
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -f "$root/slurm/lib.sh" ] || root="${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
if [ ! -f "$root/slurm/lib.sh" ]; then
    echo "error: $root is not megarl's repository; submit from its root, or set MEGARL_ROOT" >&2
    exit 64
fi
# shellcheck source=slurm/lives.sh
source "$root/slurm/lives.sh"
megarl_job "$@"
