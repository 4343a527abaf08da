#!/usr/bin/env bash
# Converts checkpoints, PROCESSES (default 8) on each node together:
#   sbatch --nodes=2 slurm/convert.sh hf_to_megatron --hf DIR --out DIR [...]
#   sbatch --nodes=1 slurm/convert.sh megatron_to_hf ...
# What follows the direction is tools/convert_<direction>.py's; --help tells. Also with bash, without Slurm.
#SBATCH --job-name=megarl-convert
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
set -euo pipefail

case "${1:-}" in
    hf_to_megatron | megatron_to_hf) ;;
    *)
        echo "usage: sbatch [options] slurm/convert.sh hf_to_megatron|megatron_to_hf ARGUMENTS" >&2
        exit 64
        ;;
esac
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
each_node_runs "${PROCESSES:-8}" "$root/tools/convert_$1.py" "${@:2}"
