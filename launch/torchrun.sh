#!/usr/bin/env bash
# Trains: bash launch/torchrun.sh CONFIG [key.path=value ...]
# The config is checked first. Exit status 64: a mistake to correct; 75: the machine's fault, may be retried.
# Several nodes: on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set; see megarl/launch.py.
set -euo pipefail
# shellcheck source=launch/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
if ! "$python" -c 'import pydantic, yaml' 2>/dev/null; then
    printf 'error: %s cannot run megarl\n  remedy: bash launch/setup.sh\n' "$python" >&2
    exit 64
fi
exec "$python" -m megarl.launch "$@"
