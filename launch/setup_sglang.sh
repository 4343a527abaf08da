#!/usr/bin/env bash
# Makes an environment of its own for SGLang on a CPU; does nothing where that is done already. Then set
# rollout.sglang_python to its bin/python. (On GPUs: pip install sglang==0.5.23 into an environment of its own.)
#   bash launch/setup_sglang.sh
# MEGARL_SGLANG_VENV=DIR where (default: .venv-sglang)
# MEGARL_TORCH_INDEX=URL an index with CPU builds of torch, if the configured one has none
# PYTHON=python3.11      the interpreter that it is made with: 3.11, which the pins were seen to work with
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGARL_SGLANG_VENV:-$root/.venv-sglang}"
pins="$root/megarl/rollout/sglang_cpu/requirements.txt"
log="$venv/megarl-setup.log"

# shellcheck source=launch/venv.sh
source "$root/launch/venv.sh"

# Without dependencies: sglang's wheel asks for CUDA packages, and torchvision for a torch with CUDA.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps "$@" >>"$log" 2>&1
}

[ -x "$venv/bin/python" ] || make_venv "sys.version_info[:2] != (3, 11)" "Python 3.11" python3.11 python3
stamp="$venv/.megarl-$(cksum <"$pins" | cut -d ' ' -f 1)"
if [ ! -f "$stamp" ]; then
    : >"$log"
    say "SGLang and what it needs, 3 GB (log: $log)"
    if ! pip_install ${MEGARL_TORCH_INDEX:+--extra-index-url "$MEGARL_TORCH_INDEX"} --requirement "$pins"; then
        tail -n 15 "$log" >&2
        fail "pip could not install $pins; the whole log: $log"
    fi
    touch "$stamp"
    say "done"
fi
say "ready: rollout.sglang_python=$venv/bin/python"
