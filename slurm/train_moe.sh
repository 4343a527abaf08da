#!/usr/bin/env bash
# Trains a MoE model with GSPO, or whatever the config says, on a Slurm cluster:
#   sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 slurm/train_moe.sh CONFIG [key.path=value ...]
# Submit from the root of the repository. The same line resumes. Nodes beyond those needed are spares. In an salloc, or on
# one machine without Slurm: bash slurm/train_moe.sh CONFIG. DRY=1 prints what would be done. More: docs/slurm.md.
# Exit status: 0 done; 64 a mistake to correct; 75 a fault of the machine that several tries did not mend.
#SBATCH --job-name=megarl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@600
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch [options] slurm/train_moe.sh CONFIG [key.path=value ...]" >&2
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
