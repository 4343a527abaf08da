# shellcheck shell=bash
# Sourced by the other scripts: sets `root` (of the repository) and `python` (the interpreter to run megarl with):
# of $MEGARL_VENV, else of the active virtual environment, else of .venv, else the first python3.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGARL_VENV:-${VIRTUAL_ENV:-$root/.venv}}"
python="$venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
