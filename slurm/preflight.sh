#!/usr/bin/env bash
# Measures the nodes of an allocation, and lists the bad ones: salloc --nodes=4 bash slurm/preflight.sh [options of
# tools/preflight.py]. Run it from a directory that all nodes share. Status 0, or 75 if a node is bad.
#SBATCH --job-name=megarl-preflight
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

# Slurm runs a copy of this script from elsewhere
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -f "$root/slurm/lib.sh" ] || root="${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
if [ ! -f "$root/slurm/lib.sh" ]; then
    echo "error: $root is not megarl's repository; submit from its root, or set MEGARL_ROOT" >&2
    exit 64
fi
# shellcheck source=slurm/lib.sh
source "$root/slurm/lib.sh"
begin
each_node_runs 0 "$root/tools/preflight.py" "$@"
