# shellcheck shell=bash
# What all job scripts share: settings, nodes, and the steps that are run on them. (lives.sh is about training, which may
# take several launches.) Works in a batch job, in an salloc, and without Slurm, where this machine is the only node.
# Needs bash 4.4.
#
# Environment (all optional; what is the same for all your jobs goes into slurm/site.env; see lives.sh for more):
#   MEGARL_VENV      virtual environment on a file system that all nodes see (default: the active one, else .venv)
#   SRUN_ARGS        further arguments of every srun, one string: --mpi=none
#   CONTAINER_ARGS   further arguments of the sruns that need Python, one string (pyxis):
#                    --container-image=/images/megarl.sqsh --container-mounts=/scratch --container-name=megarl
#   MASTER_PORT      the first of 200 ports on the first node (default: 20000 + a number from the job's)
#   DRY=1            print every command, run none, write nothing; NODES="n1 n2 ..." stands for an allocation then

declare -A step_pid=() step_nodes=() # of each step: the process of its srun, and its nodes

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

# Runs a command, or prints it under DRY=1.
run() {
    if [ -n "${DRY:-}" ]; then
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    else
        "$@"
    fi
}

# bash's own SECONDS follow the wall clock, and whoever sets that must not seem to have stopped nodes: here they are
# those since the host was started, as of the last tick
unset SECONDS
tick() {
    read -r SECONDS _ </proc/uptime
    SECONDS="${SECONDS%%.*}"
}
tick

nap() { # SECONDS; a signal ends it
    sleep "$1" &
    wait $! || true
    tick
}

# Settings and what follows from them. $root is the repository's.
begin() {
    local file="${MEGARL_SITE_ENV:-$root/slurm/site.env}"
    if [ -f "$file" ]; then
        set -a
        # shellcheck source=slurm/site.env.example
        source "$file"
        set +a
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    [ -z "${DRY:-}" ] || export PYTHONDONTWRITEBYTECODE=1
    in_slurm="${SLURM_JOB_ID:+yes}" job="${SLURM_JOB_ID:-local}" restart="${SLURM_RESTART_COUNT:-0}"
    # what Slurm is asked about: one task of an array has the array's own number, which would mean all of them
    own="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}" own="${own:-$job}"
    if [ -n "$in_slurm" ]; then
        # options of sbatch are defaults of every srun: steps need the variables that are set for them, and all GPUs and
        # cores of their nodes, with one task there
        export SLURM_EXPORT_ENV=ALL
        unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
    fi
    pretended="${DRY:+${NODES:-}}" # an allocation to print commands for
    first_port="${MASTER_PORT:-$((20000 + (10#${job//[!0-9]/0} * 61 + restart * 17) % 10000))}"
    IFS=' ' read -r -a srun_args <<<"${SRUN_ARGS:-}"
    IFS=' ' read -r -a container_args <<<"${CONTAINER_ARGS:-}"
}

# --- nodes

# The nodes of the allocation that Slurm has not taken away, one a line. Slurm's controller may be away for some minutes.
allocated() {
    local nodes='' try
    if [ -n "$in_slurm" ]; then
        for try in {1..60}; do
            if nodes="$(squeue --noheader --jobs="$own" --format=%N)" && [ -n "$nodes" ]; then break; fi
            [ "$try" -gt 1 ] || say "Slurm does not tell the nodes of job $own; asking again every 10 s" >&2
            nap 10
        done
        scontrol show hostnames "${nodes:-$SLURM_JOB_NODELIST}"
    elif [ -n "$pretended" ]; then
        tr -s ' ' '\n' <<<"$pretended"
    else
        uname -n
    fi
}

# The address that Slurm itself uses: a node's name need not resolve on the other nodes.
address_of() { # NODE
    local address="$1"
    if [ -n "$in_slurm" ]; then
        address="$(scontrol -o show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
    elif [ -z "$pretended" ]; then
        address=127.0.0.1
    fi
    echo "${address:-$1}"
}

# Which of these nodes answer within half a minute, one a line. One srun asks all of them: it prints those that live,
# even where it fails for one that does not.
answering() { # NODE...
    local answers node
    if [ -z "$in_slurm" ] || [ -n "${DRY:-}" ] || [ "${PREFLIGHT:-}" = off ]; then
        printf '%s\n' "$@"
        return
    fi
    answers="$(timeout --kill-after=5 30 srun "${srun_args[@]}" --overlap --no-kill --job-name=ping --nodes=$# \
        --ntasks=$# --ntasks-per-node=1 --nodelist="$(IFS=, && echo "$*")" printenv SLURMD_NODENAME 2>/dev/null)" || true
    for node in "$@"; do
        [[ $'\n'$answers$'\n' != *$'\n'$node$'\n'* ]] || echo "$node"
    done
}

# --- steps: one task a node, with all of the node's cores and GPUs

# Starts a step in the background.
start_step() { # NAME NODES OUTPUT [VARIABLE=VALUE...] -- COMMAND...   OUTPUT '' is the job's
    local name="$1" nodes="$2" output="$3" variables=() count command=()
    shift 3
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    count="$(wc -w <<<"$nodes")"
    if [ -n "$in_slurm$pretended" ]; then
        # --overlap: what is left of a step on a lost node holds its resources until Slurm gives the node up.
        # One task a node is all of the node's ranks: they need all its cores, not the one that a task is bound to.
        command=(srun "${srun_args[@]}" --job-name="$name" --nodes="$count" --ntasks="$count" --ntasks-per-node=1
            --nodelist="${nodes// /,}" --overlap --cpu-bind=none --kill-on-bad-exit=1 "${container_args[@]}")
    fi
    command=(env "MEGARL_NODES=$nodes" "${variables[@]}" "${command[@]}" "$@")
    if [ -n "${DRY:-}" ]; then
        run "${command[@]}"
        return
    fi
    if [ -n "$output" ]; then
        "${command[@]}" >>"$output" 2>&1 &
    else
        "${command[@]}" &
    fi
    # shellcheck disable=SC2034 # lives.sh reads it
    step_pid[$name]=$! step_nodes[$name]="$nodes"
}

is_running() { [ -n "${step_pid[$1]:-}" ] && kill -0 "${step_pid[$1]}" 2>/dev/null; }

# The status of a step that has ended; forgets it.
reap() { # NAME
    local status=0
    { wait "${step_pid[$1]}" || status=$?; } 2>/dev/null # bash would tell that it was killed
    unset "step_pid[$1]"
    return "$status"
}

# Sends a signal to all tasks of a step. scancel waits for a lost node; nobody waits for scancel.
signal_step() { # NAME SIGNAL
    local numbers
    if [ -n "$in_slurm" ]; then
        numbers="$(squeue --steps --noheader --jobs="$own" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }')" ||
            true # without Slurm's controller the step's srun is killed in the end
        # shellcheck disable=SC2086 # several numbers are several words
        [ -z "$numbers" ] || timeout 30 scancel --quiet --signal="$2" $numbers 2>/dev/null &
    else
        kill -s "$2" "${step_pid[$1]}" || true
    fi
}

# Ends steps, gracefully first where the signal is TERM. srun waits for a lost node until Slurm gives the node up, so in
# the end it is killed itself.
cancel() { # SIGNAL SECONDS NAME...
    local name running=() deadline
    tick
    deadline=$((SECONDS + $2))
    for name in "${@:3}"; do
        if is_running "$name"; then signal_step "$name" "$1"; fi
    done
    for name in "${@:3}"; do
        while is_running "$name" && [ "$SECONDS" -lt "$deadline" ]; do nap 0.2; done
        if is_running "$name"; then running+=("$name"); fi
    done
    if [ ${#running[@]} -eq 0 ]; then
        return
    elif [ "$1" = TERM ]; then
        cancel KILL 5 "${running[@]}"
        return
    fi
    for name in "${running[@]}"; do
        kill -s KILL "${step_pid[$name]}" || true
        while is_running "$name"; do nap 0.1; done
    done
}

cancel_all() { cancel TERM 15 "${!step_pid[@]}"; }

# A Python program on all nodes; its status is this script's.
each_node_runs() { # PROCESSES-A-NODE PROGRAM ARGUMENTS...   under torchrun, or 0: once, finding the others by itself
    local nodes address status=0 command=("${@:2}")
    mapfile -t nodes < <(allocated)
    address="$(address_of "${nodes[0]}")"
    if [ $(($1 * ${#nodes[@]})) -gt 1 ]; then # torchrun takes its --node-rank from PET_NODE_RANK, which node.sh sets
        command=(-m torch.distributed.run "--nnodes=${#nodes[@]}" "--nproc-per-node=$1" "--master-addr=$address"
            "--master-port=$first_port" --max-restarts=0 "${command[@]}")
    fi
    trap 'cancel_all; exit 143' TERM INT HUP
    start_step megarl "${nodes[*]}" '' NODE_RANK= "NNODES=${#nodes[@]}" "MASTER_ADDR=$address" \
        "MASTER_PORT=$first_port" -- bash "$root/slurm/node.sh" python "${command[@]}"
    [ -n "${DRY:-}" ] || reap megarl || status=$?
    exit "$status"
}
