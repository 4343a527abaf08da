#!/usr/bin/env bash
# Makes the virtual environment and installs megarl into it; does nothing where that is done already.
#   bash launch/setup.sh
# MEGARL_VENV=DIR        where (default: the active environment, else .venv)
# MEGARL_EXTRAS=a,b      what (default cpu,rewards,dev; on a cluster: gpu,rewards)
# MEGARL_TORCH_INDEX=URL an index with CPU builds of torch, if the configured one has none
# PYTHON=python3.12      which interpreter a new environment is made with (3.11 or newer)
set -euo pipefail
# shellcheck source=launch/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
# shellcheck source=launch/venv.sh
source "$root/launch/venv.sh"
extras="${MEGARL_EXTRAS:-cpu,rewards,dev}"
log="$venv/megarl-setup.log"

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1
}

# The CPU build of torch is a fifth of the plain one, which brings CUDA libraries. Taken from the configured index,
# else from MEGARL_TORCH_INDEX; where neither has it, the plain one is installed with the rest.
install_cpu_torch() {
    local build
    build="torch==$("$venv/bin/python" -c 'from megarl.versions import CPU; print(CPU["torch"])')+cpu"
    say "$build"
    pip_install "$build" ||
        { [ -n "${MEGARL_TORCH_INDEX:-}" ] && pip_install --extra-index-url "$MEGARL_TORCH_INDEX" "$build"; } ||
        say "no CPU build of torch to be had here; taking the plain one"
}

[ -x "$venv/bin/python" ] || make_venv "sys.version_info < (3, 11)" "Python 3.11 or newer" \
    python3.11 python3.12 python3.13 python3
stamp="$venv/.megarl-$(cat "$root/setup.py" "$root/megarl/versions.py" - <<<"$extras" | cksum | cut -d ' ' -f 1)"
if [ ! -f "$stamp" ]; then
    : >"$log"
    [[ ",$extras," != *,cpu,* ]] || install_cpu_torch
    say "megarl[$extras] and what it needs (log: $log)"
    if ! pip_install --editable "${root}[$extras]"; then
        tail -n 15 "$log" >&2
        fail "pip could not install megarl[$extras]; the whole log: $log"
    fi
    touch "$stamp"
    say "done"
fi
