# shellcheck shell=bash
# Sourced by the set-up scripts, which set `venv`: how they speak, end, and make a virtual environment.

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 64
}

say() {
    printf '[setup %3d s] %s\n' "$SECONDS" "$1"
}

# make_venv WRONG WANTED NAME...: makes $venv with $PYTHON, else the first NAME, for which the Python expression WRONG
# (over sys.version_info) is false; WANTED says what that is.
make_venv() {
    local wrong="$1" wanted="$2" candidate
    shift 2
    for candidate in ${PYTHON:+"$PYTHON"} "$@"; do
        if "$candidate" -c "import sys; sys.exit($wrong)" 2>/dev/null; then
            # shellcheck disable=SC2154 # who sources this sets it
            say "making $venv with $("$candidate" --version)"
            "$candidate" -m venv "$venv" || fail "$candidate -m venv failed; on Debian: apt-get install python3-venv"
            return
        fi
    done
    fail "no $wanted found; install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}
