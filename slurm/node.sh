#!/usr/bin/env bash
# Runs on every node of a step: node.sh COMMAND...
# Sets NODE_RANK, if it is not given, to this node's place in MEGARL_NODES. (Slurm numbers a step's nodes in an order of
# its own.) The word `python` stands for megarl's interpreter.
set -euo pipefail
# shellcheck source=launch/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/python.sh"
if [ -z "${NODE_RANK:-}" ]; then
    NODE_RANK=0
    for node in $MEGARL_NODES; do
        [ "$node" != "${SLURMD_NODENAME:-$node}" ] || break
        NODE_RANK=$((NODE_RANK + 1))
    done
fi
export NODE_RANK PET_NODE_RANK="$NODE_RANK" # the latter is torchrun's
ulimit -S -n "$(ulimit -H -n)" # a connection between each pair of ranks, and to each engine
[ "$1" != python ] || set -- "$python" "${@:2}"
exec "$@"
