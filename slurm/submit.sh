#!/usr/bin/env bash
# bash slurm/submit.sh [sbatch options] slurm/train_moe.sh CONFIG [key.path=value ...]
# sbatch with the settings of slurm/site.env (account, partition, qos, ...). DRY=1 prints the line.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=slurm/lib.sh
source "$root/slurm/lib.sh"
begin
export MEGARL_ROOT="$root"
[ -z "${DRY:-}" ] || env | grep '^SBATCH_' || true
run sbatch "$@"
