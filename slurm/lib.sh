# shellcheck shell=bash
# What the job scripts share: the nodes, the steps on them, and what happens when one ends; docs/slurm.md tells it in
# words. Works in a batch job, in an salloc, and without Slurm, where this machine is the only node. Needs bash 4.4.
#
# Environment (all optional; what is the same for all your jobs goes into slurm/site.env):
#   MEGARL_VENV      virtual environment on a file system that all nodes see (default: the active one, else .venv)
#   SRUN_ARGS        further arguments of every srun, one string: --mpi=none
#   CONTAINER_ARGS   further arguments of the sruns that need Python, one string (pyxis):
#                    --container-image=/images/megarl.sqsh --container-mounts=/scratch --container-name=megarl
#   GPUS_PER_NODE    GPUs of a node, or its most ranks where there are no GPUs (default: what Slurm gave; else all ranks
#                    divided by the nodes). Nodes beyond those needed are spares.
#   PREFLIGHT        full: measure all nodes before each launch; ping: see who answers; off (default: full, but ping on
#                    one node).   PREFLIGHT_ARGS: further arguments of tools/preflight.py
#   RETRIES          launches in a row that may fail without a finished step between them (default 3)
#   DEAD_S, HANG_S   a node is lost after so many seconds without a sign of life (60); a run hangs after so many
#                    without progress, its start included (1800)
#   STOP_S           seconds that the run has to save and end when it is asked to (540; --signal gives 600)
#   MASTER_PORT      the first of 200 ports on the first trainer node (default: 20000 + a number from the job's)
#   DRY=1            print every command, run none, write nothing; NODES="n1 n2 ..." stands for an allocation then

EXIT_MISTAKE=64
EXIT_FAULT=75
EXIT_GRACE_S=20 # for all ranks to end once one has told why it failed

declare -A step_pid=() step_nodes=() beat=() beat_at=() bad=()
healthy=() spares=()
counter=''    # the process that says that this script is alive
stop_asked='' # SECONDS when the stop was asked for
end_asked=''  # the signal that ends the job, once it came

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

nap() { # SECONDS; a signal ends it
    sleep "$1" &
    wait $! || true
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
    first_port="${MASTER_PORT:-$((20000 + (10#${job//[!0-9]/0} * 61 + restart * 17) % 10000))}"
    dead_s="${DEAD_S:-60}" hang_s="${HANG_S:-1800}" retries="${RETRIES:-3}"
    IFS=' ' read -r -a srun_args <<<"${SRUN_ARGS:-}"
    IFS=' ' read -r -a container_args <<<"${CONTAINER_ARGS:-}"
    IFS=' ' read -r -a preflight_args <<<"${PREFLIGHT_ARGS:-}"
}

# --- nodes

# The nodes of the allocation that Slurm has not taken away, one a line.
allocated() {
    if [ -n "$in_slurm" ]; then
        scontrol show hostnames "$(squeue --noheader --jobs="$job" --format=%N)"
    elif [ -n "${DRY:-}" ] && [ -n "${NODES:-}" ]; then
        tr -s ' ' '\n' <<<"$NODES"
    else
        uname -n
    fi
}

# The address that Slurm itself uses: a node's name need not resolve on the other nodes.
address_of() { # NODE
    local address="$1"
    if [ -n "$in_slurm" ]; then
        address="$(scontrol -o show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
    elif [ -z "${NODES:-}" ]; then
        address=127.0.0.1
    fi
    echo "${address:-$1}"
}

# Which of these nodes answer within half a minute, one a line. One srun asks all of them: it prints those that live,
# even where it fails for one that does not.
answering() { # NODE...
    local answers node
    if [ -z "$in_slurm" ] || [ -n "${DRY:-}" ] || [ "$preflight" = off ]; then
        printf '%s\n' "$@"
        return
    fi
    answers="$(timeout --kill-after=5 30 srun "${srun_args[@]}" --overlap --no-kill --job-name=ping --nodes=$# \
        --ntasks=$# --ntasks-per-node=1 --nodelist="$(IFS=, && echo "$*")" printenv SLURMD_NODENAME 2>/dev/null)" || true
    for node in "$@"; do
        [[ $'\n'$answers$'\n' != *$'\n'$node$'\n'* ]] || echo "$node"
    done
}

mark_bad() { # NODE WHY
    [ -z "${bad[$1]:-}" ] || return 0
    bad[$1]="$2"
    say "node $1 is left out from now on: $2"
    printf '%(%F %T)T job %s node %s: %s\n' -1 "$job" "$1" "$2" >>"$run_dir/bad_nodes"
}

# Sets `healthy`: the nodes that are allocated, answer, and pass the preflight, in the allocation's order.
find_healthy() {
    local node all=()
    while read -r node; do
        [ -n "${bad[$node]:-}" ] || all+=("$node")
    done < <(allocated)
    mapfile -t healthy < <([ ${#all[@]} -eq 0 ] || answering "${all[@]}")
    [ -z "$end_asked" ] || return 0 # then nothing answers
    for node in "${all[@]}"; do
        [[ " ${healthy[*]} " == *" $node "* ]] || mark_bad "$node" "did not answer"
    done
    if [ "$preflight" = full ] && [ ${#healthy[@]} -gt 0 ]; then measure; fi
}

# Takes out of `healthy` the nodes that tools/preflight.py finds fault with.
measure() {
    local verdict="$life_dir/preflight.bad" node why status=0 all=("${healthy[@]}")
    start_step preflight "${all[*]}" '' "NNODES=${#all[@]}" NODE_RANK= "MASTER_ADDR=$(address_of "${all[0]}")" \
        "MASTER_PORT=$((port + 1))" -- bash "$root/slurm/node.sh" python "$root/tools/preflight.py" \
        --folder "$life_dir" --bad "$verdict" "${preflight_args[@]}"
    [ -z "${DRY:-}" ] || return 0
    wait_step preflight 600 || status=$?
    [ -z "$end_asked" ] || return 0
    if [ -f "$verdict" ]; then
        while read -r node why; do mark_bad "$node" "$why"; done <"$verdict"
    else
        say "the preflight came to no end (status $status)"
        mapfile -t healthy < <(answering "${all[@]}")
        for node in "${all[@]}"; do
            [[ " ${healthy[*]} " == *" $node "* ]] || mark_bad "$node" "did not answer after a preflight without an end"
        done
    fi
    healthy=()
    for node in "${all[@]}"; do
        [ -n "${bad[$node]:-}" ] || healthy+=("$node")
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
    if [ -n "$in_slurm" ] || [ -n "${NODES:-}" ]; then
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

# Waits for a step, ends it after the time; its status.
wait_step() { # NAME SECONDS
    local deadline=$((SECONDS + $2))
    while is_running "$1" && [ "$SECONDS" -lt "$deadline" ]; do nap 0.2; done
    cancel_step "$1" KILL
    reap "$1"
}

# Ends a step, gracefully first where the signal is TERM. srun waits for a lost node until Slurm gives the node up, and
# scancel waits, too: nobody waits for them, and srun is killed itself in the end.
cancel_step() { # NAME SIGNAL [SECONDS]
    local numbers deadline=$((SECONDS + ${3:-5}))
    is_running "$1" || return 0
    if [ -n "$in_slurm" ]; then
        numbers="$(squeue --steps --noheader --jobs="$job" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }')"
        # shellcheck disable=SC2086 # several numbers are several words
        [ -z "$numbers" ] || timeout 30 scancel --quiet --signal="$2" $numbers 2>/dev/null &
    else
        kill -s "$2" "${step_pid[$1]}" || true
    fi
    while is_running "$1" && [ "$SECONDS" -lt "$deadline" ]; do nap 0.2; done
    is_running "$1" || return 0
    if [ "$2" = TERM ]; then
        cancel_step "$1" KILL
    else
        kill -s KILL "${step_pid[$1]}" || true
        while is_running "$1"; do nap 0.1; done
    fi
}

cancel_all() { # SIGNAL
    local name
    [ -z "$counter" ] || kill "$counter" 2>/dev/null || true
    for name in "${!step_pid[@]}"; do cancel_step "$name" "$1" 15; done
}

# --- signs of life

read_step() { sed -n 's/.*"step": *\([0-9]*\).*/\1/p' "$run_dir/heartbeat.json" 2>/dev/null || true; }

# The status in an exit.json, '' if there is none.
exit_status() { sed -n 's/.*"status": *\([0-9]*\).*/\1/p' "$1/exit.json" 2>/dev/null || true; }

# Sets quiet_s: seconds, by this clock, since the file changed; '' while nobody has written it.
watch_file() { # FILE
    local now=''
    { read -r now <"$1"; } 2>/dev/null || true # a last line without an end is read all the same
    if [ "$now" != "${beat[$1]-}" ]; then beat[$1]="$now" beat_at[$1]="$SECONDS"; fi
    quiet_s="${now:+$((SECONDS - ${beat_at[$1]:-$SECONDS}))}"
}

# Marks a node of the step as bad if its launcher has stopped counting; true if one has.
lost_a_node() { # STEP PREFIX FIRST
    local node number="$3"
    for node in ${step_nodes[$1]}; do
        watch_file "$life_dir/$2$number/alive"
        if [ "${quiet_s:-0}" -ge "$dead_s" ]; then
            mark_bad "$node" "no sign of life for $quiet_s s"
            return 0
        fi
        number=$((number + 1))
    done
    return 1
}

# A job with --no-kill outlives its nodes, also the one that runs this script, and nobody would start it again. A task
# on another node requeues the job when this script stops counting.
start_counting() {
    local file="$run_dir/logs/$job.$restart.alive"
    [ "${ENVIRONMENT:-}" = BATCH ] || return 0
    while echo "$SECONDS" >"$file" && sleep 2; do :; done &
    counter=$!
}

keep_guard() {
    local container_args=() node="${healthy[-1]}" # it needs scontrol, and no Python
    if [ -z "$counter" ] || [ ${#healthy[@]} -eq 1 ] || [ -n "${bad[$node]:-}" ] || is_running guard; then return 0; fi
    start_step guard "$node" "$life_dir/guard.log" -- \
        bash "$root/slurm/guard.sh" "$run_dir/logs/$job.$restart.alive" "$dead_s"
}

# --- one life: a launch, until its trainers have ended

# What the config says, and what the nodes are for: run_dir, trainer_ranks and rollout_ranks (of each node).
plan() { # CONFIG...
    local count told status=0 first=()
    count="$(allocated | wc -l)"
    [ -z "$in_slurm" ] || first=(srun "${srun_args[@]}" --nodes=1 --ntasks=1 --overlap --cpu-bind=none "${container_args[@]}")
    told="$("${first[@]}" bash "$root/launch/torchrun.sh" --check --nodes "$count" --gpus \
        "${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}" "$@")" || status=$?
    [ "$status" -eq 0 ] || exit "$status" # a mistake, told by the check
    echo "$told"
    run_dir="$(sed -n 's/^run directory: //p' <<<"$told")"
    trainer_shares="$(sed -n 's/^trainer nodes: //p' <<<"$told")"
    rollout_shares="$(sed -n 's/^rollout nodes: //p' <<<"$told")"
    IFS=, read -r -a trainer_ranks <<<"$trainer_shares"
    IFS=, read -r -a rollout_ranks <<<"$rollout_shares"
    preflight=ping
    [ -z "$in_slurm${NODES:-}" ] || [ "$count" -lt 2 ] || preflight=full
    preflight="${PREFLIGHT:-$preflight}"
}

launch() { # CONFIG...
    local number trainers=${#trainer_ranks[@]} rollouts=${#rollout_ranks[@]} variables
    local nodes=("${healthy[@]:0:trainers}")
    rollout_nodes=("${healthy[@]:trainers:rollouts}") spares=("${healthy[@]:trainers + rollouts}")
    rollout_deaths=() rollout_ended=() beat=() beat_at=()
    variables=("MEGARL_LIFE=$life" "MASTER_ADDR=$(address_of "${nodes[0]}")" "MASTER_PORT=$port")
    say "life $life: trainers on ${nodes[*]}; rollout ranks on ${rollout_nodes[*]:-the same}; spare: ${spares[*]:-none}"
    start_step trainers "${nodes[*]}" '' "${variables[@]}" "MEGARL_PARTITION=${rollout_shares:+trainers}" NODE_RANK= \
        "NNODES=$trainers" "NPROC_PER_NODE=$trainer_shares" -- \
        bash "$root/slurm/node.sh" bash "$root/launch/torchrun.sh" "$@"
    rollout_variables=("${variables[@]}" MEGARL_PARTITION=rollouts "NNODES=$rollouts" "NPROC_PER_NODE=$rollout_shares")
    for number in "${!rollout_nodes[@]}"; do launch_rollout "$number" "$@"; done
}

# Every rollout node is a step and a world of its own: its end is nobody else's.
launch_rollout() { # NUMBER CONFIG...
    local number="$1"
    shift
    [ -n "${DRY:-}" ] || rm -f "$life_dir/rollouts$number/"{alive,exit.json}
    start_step "rollouts$number" "${rollout_nodes[number]}" "$life_dir/rollouts$number.log" "${rollout_variables[@]}" \
        "NODE_RANK=$number" -- bash "$root/slurm/node.sh" bash "$root/launch/torchrun.sh" "$@"
}

# Starts rollout nodes again that have ended while the trainers go on; a lost one's place is taken by a spare.
keep_rollouts() { # CONFIG...
    local number name status
    for number in "${!rollout_nodes[@]}"; do
        name="rollouts$number"
        if is_running "$name"; then
            if lost_a_node "$name" rollouts "$number"; then cancel_step "$name" KILL; fi
        elif [ -n "${step_pid[$name]:-}" ]; then
            # when the trainers fail, rollout ranks may end before them: that shows within some seconds
            rollout_ended[number]="${rollout_ended[number]:-$SECONDS}"
            if [ $((SECONDS - rollout_ended[number])) -lt 5 ] || [ -f "$run_dir/exit.json" ]; then continue; fi
            status=0
            reap "$name" || status=$?
            rollout_ended[number]=''
            if [ "$(exit_status "$life_dir/$name")" = $EXIT_MISTAKE ]; then
                say "rollout node $number ended by a mistake; it is told in $life_dir/$name.log"
                cancel_step trainers TERM
                mistaken=yes
                return
            elif [ "$status" -ne 0 ]; then # else the trainers have asked it to end
                replace_rollout "$number" "$status" "$@"
            fi
        fi
    done
}

replace_rollout() { # NUMBER STATUS CONFIG...
    local number="$1" node="${rollout_nodes[$1]}"
    say "rollout node $number ($node) ended with status $2; the trainers go on"
    rollout_deaths[number]=$((${rollout_deaths[number]:-0} + 1))
    if [ -z "$(answering "$node")" ] && [ -z "$end_asked" ]; then
        mark_bad "$node" "did not answer"
    elif [ "${rollout_deaths[number]}" -gt "$retries" ]; then
        mark_bad "$node" "its rollout ranks ended ${rollout_deaths[number]} times"
    fi
    if [ -n "${bad[$node]:-}" ]; then
        if [ ${#spares[@]} -eq 0 ]; then
            say "no node is left for rollout node $number; the others go on without it"
            return
        fi
        node="${spares[0]}" spares=("${spares[@]:1}") rollout_deaths[number]=0
        rollout_nodes[number]="$node"
    fi
    say "rollout node $number starts again on $node"
    shift 2
    launch_rollout "$number" "$@"
}

# Until the trainers have ended or were ended; sets `outcome`: done, stopped, mistake or fault.
watch() { # CONFIG...
    local begun="$SECONDS" failed_at='' told status=0 prefix=node
    [ -z "$rollout_shares" ] || prefix=trainers
    mistaken=''
    while is_running trainers && [ -z "$end_asked$mistaken" ]; do
        nap 1
        keep_guard
        told="$(exit_status "$run_dir")"
        [ "${told:-0}" = 0 ] || failed_at="${failed_at:-$SECONDS}"
        watch_file "$run_dir/heartbeat.json"
        if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge $EXIT_GRACE_S ]; then
            say "a rank has failed, and others have not ended"
        elif [ -n "$stop_asked" ] && [ $((SECONDS - stop_asked)) -ge "${STOP_S:-540}" ]; then
            say "the run has not ended within ${STOP_S:-540} s; ending it without another checkpoint"
        elif [ "${quiet_s:-$((SECONDS - begun))}" -ge "$hang_s" ]; then
            say "no sign of progress for $hang_s s; ending the run"
        elif ! lost_a_node trainers "$prefix" 0; then
            keep_rollouts "$@"
            continue
        fi
        cancel_step trainers KILL
        break
    done
    [ -z "$end_asked" ] || finish 143 "ended by $end_asked"
    reap trainers || status=$?
    told="$(exit_status "$run_dir")"
    outcome=fault
    if [ -n "$mistaken" ] || [ "$told" = $EXIT_MISTAKE ]; then
        outcome=mistake
    elif [ "$told" = 0 ]; then
        outcome=stopped # by a STOP file, after a checkpoint; the run is not complete
    elif [ "$status" -eq 0 ]; then
        outcome="done"
    elif [ -n "$stop_asked" ]; then
        outcome=stopped # not in time
    fi
    say "life $life has ended: $outcome (status ${told:-$status}, step $(read_step))"
    end_rollouts
}

# Rollout ranks end by themselves when the trainers have; the others of a fault are not worth waiting for.
end_rollouts() {
    local name deadline=$((SECONDS + 30))
    for name in "${!step_pid[@]}"; do
        [[ $name == rollouts* ]] || continue
        while [ "$outcome" != fault ] && is_running "$name" && [ $SECONDS -lt $deadline ]; do nap 0.2; done
        cancel_step "$name" TERM
        reap "$name" || true
    done
}

# --- the job

# Trains: as many lives as it takes. Ends this script.
megarl_job() { # CONFIG...
    local need try=0 failures=0 before
    begin
    plan "$@"
    first_step="$(read_step)"
    need=$((${#trainer_ranks[@]} + ${#rollout_ranks[@]}))
    trap 'ask_to_stop' USR1
    trap 'end_asked=TERM' TERM
    trap 'end_asked=INT' INT
    trap 'end_asked=HUP' HUP
    trap 'cancel_all TERM' EXIT
    while :; do
        try=$((try + 1)) life="$job.$restart.$try" life_dir="$run_dir/logs/$life"
        # two ports of its own for each life: what is left of an earlier one must not be met
        port=$((first_port + 2 * ((try - 1) % 100)))
        run mkdir -p "$life_dir"
        run rm -f "$run_dir/exit.json" "$run_dir/STOP"
        [ -n "$counter${DRY:-}" ] || start_counting
        find_healthy
        [ -z "$end_asked" ] || finish 143 "ended by $end_asked"
        [ -z "$stop_asked" ] || again "asked to stop before the start"
        [ ${#healthy[@]} -ge "$need" ] || again "${#healthy[@]} nodes are left of $need"
        before="$(read_step)"
        launch "$@"
        [ -z "${DRY:-}" ] || exit 0
        watch "$@"
        case "$outcome" in
            'done') finish 0 "the run is complete" ;;
            mistake) finish $EXIT_MISTAKE "a mistake, which no other try would mend" ;;
            stopped) again "stopped at step $(read_step)" ;;
        esac
        failures=$((failures + 1))
        [ "$(read_step)" = "$before" ] || failures=1
        [ "$failures" -le "$retries" ] || finish $EXIT_FAULT "$failures launches in a row have failed"
    done
}

# A Python program on all nodes; its status is this script's.
each_node_runs() { # PROCESSES-A-NODE PROGRAM ARGUMENTS...   under torchrun, or 0: once, finding the others by itself
    local nodes address status=0 command=("${@:2}")
    mapfile -t nodes < <(allocated)
    address="$(address_of "${nodes[0]}")"
    if [ $(($1 * ${#nodes[@]})) -gt 1 ]; then # torchrun takes its --node-rank from PET_NODE_RANK, which node.sh sets
        command=(-m torch.distributed.run "--nnodes=${#nodes[@]}" "--nproc-per-node=$1" "--master-addr=$address"
            "--master-port=$first_port" --max-restarts=0 "${command[@]}")
    fi
    trap 'cancel_all TERM; exit 143' TERM INT HUP
    start_step megarl "${nodes[*]}" '' NODE_RANK= "NNODES=${#nodes[@]}" "MASTER_ADDR=$address" \
        "MASTER_PORT=$first_port" -- bash "$root/slurm/node.sh" python "${command[@]}"
    [ -n "${DRY:-}" ] || reap megarl || status=$?
    exit "$status"
}

# The trainers see the file at the end of a step, save and end.
ask_to_stop() {
    [ -z "$stop_asked" ] || return 0
    stop_asked=$SECONDS
    say "asked to stop: the run saves at the end of this step"
    : >"$run_dir/STOP" || true # where there is no run directory yet, nothing has been started
}

finish() { # STATUS WHY
    say "$2"
    cancel_all TERM
    trap - EXIT
    exit "$1"
}

# Leaves the rest to another life of the job, if it is one that Slurm can start again and this one got anywhere.
again() { # WHY
    local progressed="" status=$EXIT_FAULT
    [ -z "$stop_asked" ] || status=0
    [ "$(read_step)" = "$first_step" ] || progressed=yes
    if [ "${ENVIRONMENT:-}" != BATCH ]; then
        finish "$status" "$1; the same command goes on from the newest checkpoint"
    elif [ -z "$progressed" ] && [ "$restart" -ge "$retries" ]; then
        finish $EXIT_FAULT "$1, and no step was finished since the last restart: not requeued"
    fi
    say "$1; requeued"
    cancel_all TERM
    trap - EXIT
    scontrol requeue "$job" # which kills this script
    sleep 60
    exit $EXIT_FAULT
}
