#!/usr/bin/env bash
# Sets itself up and runs the tests: bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
# shellcheck source=launch/python.sh
source launch/python.sh
export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check .
exec "$python" -m pytest tests/unit tests/dist tests/parity tests/e2e tests/slurm
