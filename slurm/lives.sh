# shellcheck shell=bash
# Training as a job: launches one after the other, each a *life* with a name, until the run is complete or stopped, or
# nothing helps. docs/slurm.md tells it in words.
#
# Environment, beside that of lib.sh (all optional):
#   GPUS_PER_NODE    GPUs of a node, or its most ranks where there are no GPUs (default: what Slurm gave; else all ranks
#                    divided by the nodes). Nodes beyond those needed are spares.
#   PREFLIGHT        full: measure all nodes before each launch; ping: see who answers; off (default: full, but ping on
#                    one node).   PREFLIGHT_ARGS: further arguments of tools/preflight.py
#   RETRIES          launches in a row that may fail without a new checkpoint or a step further than all before; and
#                    restarts of the job after which each life must leave a new checkpoint to be requeued (default 3)
#   DEAD_S, HANG_S   a node is lost after so many seconds without a sign of life (60); a run hangs after so many
#                    without progress, longer than any phase of a step (3600)
#   STOP_S           seconds that the run has to save and end when it is asked to (540; --signal gives 600)

# shellcheck source=slurm/lib.sh disable=SC2154 # who sources this sets root
source "$root/slurm/lib.sh"

EXIT_MISTAKE=64
EXIT_FAULT=75
EXIT_GRACE_S=20 # for all ranks to end once one has told why it failed

declare -A beat=() beat_at=() bad=() # of files: what was in them, and since when; of nodes: why they are left out
healthy=() spares=()
counter=''      # the process that says that this script is alive
run_dir=''      # unknown before the plan
stop_asked=''   # SECONDS when the stop was asked for
end_asked=''    # the signal that ends the job, once it came

# --- nodes

mark_bad() { # NODE WHY
    [ -z "${bad[$1]:-}" ] || return 0
    bad[$1]="$2"
    say "node $1 is left out from now on: $2"
    printf '%(%F %T)T job %s node %s: %s\n' -1 "$job" "$1" "$2" >>"$run_dir/bad_nodes" || true # a full disk, say
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
    [ -z "$stop_asked$end_asked" ] || return 0
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

# Waits for a step, ends it after the time or when there is something else to do; its status.
wait_step() { # NAME SECONDS
    local deadline
    tick
    deadline=$((SECONDS + $2))
    while is_running "$1" && [ -z "$stop_asked$end_asked" ] && [ "$SECONDS" -lt "$deadline" ]; do nap 0.2; done
    cancel KILL 5 "$1"
    reap "$1"
}

# --- signs of life

read_step() { sed -n 's/.*"step": *\([0-9]*\).*/\1/p' "$run_dir/heartbeat.json" 2>/dev/null || true; }

# The newest checkpoint's name, '' if there is none.
newest() {
    local found=("$run_dir"/checkpoints/step_????????)
    [ ! -d "${found[-1]}" ] || echo "${found[-1]##*/}"
}

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
    # a disk that is full for a while must not end it
    while :; do
        echo "$SECONDS" >"$file" || true
        sleep 2
        tick
    done 2>/dev/null &
    counter=$!
}

keep_guard() {
    local container_args=() node="${healthy[-1]}" # it needs scontrol, and no Python
    if [ -z "$counter" ] || [ ${#healthy[@]} -eq 1 ] || [ -n "${bad[$node]:-}" ] || is_running guard; then return 0; fi
    start_step guard "$node" "$life_dir/guard.log" -- \
        bash "$root/slurm/guard.sh" "$run_dir/logs/$job.$restart.alive" "$dead_s" "$own"
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
    trainer_shares="$(sed -n 's/^ranks of trainer nodes: //p' <<<"$told")"
    rollout_shares="$(sed -n 's/^ranks of rollout nodes: //p' <<<"$told")"
    IFS=, read -r -a trainer_ranks <<<"$trainer_shares"
    IFS=, read -r -a rollout_ranks <<<"$rollout_shares"
    preflight=ping
    [ -z "$in_slurm$pretended" ] || [ "$count" -lt 2 ] || preflight=full
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
    local number="$1" alive="$life_dir/rollouts$1/alive"
    shift
    unset "beat[$alive]" "beat_at[$alive]" # its counting begins anew, perhaps with the number that was seen last
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
            if lost_a_node "$name" rollouts "$number"; then cancel KILL 5 "$name"; fi
        elif [ -n "${step_pid[$name]:-}" ]; then
            # when the trainers fail, rollout ranks may end before them: that shows within some seconds
            rollout_ended[number]="${rollout_ended[number]:-$SECONDS}"
            if [ $((SECONDS - rollout_ended[number])) -lt 5 ] || [ -f "$run_dir/exit.json" ]; then continue; fi
            status=0
            reap "$name" || status=$?
            rollout_ended[number]=''
            if [ "$(exit_status "$life_dir/$name")" = $EXIT_MISTAKE ]; then
                say "rollout node $number ended by a mistake; it is told in $life_dir/$name.log"
                cancel TERM 15 trainers
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
    if [ -z "${bad[$node]:-}" ] && [ -z "$(answering "$node")" ] && [ -z "$end_asked" ]; then
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
    local begun failed_at='' told status=0 prefix=node
    [ -z "$rollout_shares" ] || prefix=trainers
    mistaken=''
    tick
    begun="$SECONDS"
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
        cancel KILL 5 trainers
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
    local number name names=() deadline=$((SECONDS + 30))
    for number in "${!rollout_nodes[@]}"; do
        if [ -n "${step_pid[rollouts$number]:-}" ]; then names+=("rollouts$number"); fi
    done
    for name in "${names[@]}"; do
        while [ "$outcome" != fault ] && is_running "$name" && [ "$SECONDS" -lt "$deadline" ]; do nap 0.2; done
    done
    cancel TERM 15 "${names[@]}"
    for name in "${names[@]}"; do reap "$name" || true; done
}

# --- the job

# Trains: as many lives as it takes. Ends this script.
megarl_job() { # CONFIG...
    local need try=0 failures=0 step saved furthest
    trap ask_to_stop USR1 # comes at once where the time limit is shorter than --signal says
    begin
    dead_s="${DEAD_S:-60}" hang_s="${HANG_S:-3600}" retries="${RETRIES:-3}"
    IFS=' ' read -r -a preflight_args <<<"${PREFLIGHT_ARGS:-}"
    plan "$@"
    need=$((${#trainer_ranks[@]} + ${#rollout_ranks[@]}))
    trap 'end_asked=TERM' TERM
    trap 'end_asked=INT' INT
    trap 'end_asked=HUP' HUP
    trap end_all EXIT
    [ -z "$in_slurm" ] || [ -n "${DRY:-}" ] || claim
    first_saved="$(newest)" furthest="$(read_step)" furthest="${furthest:-0}"
    while :; do
        # in an salloc, an earlier call of this script had lives too
        while try=$((try + 1)) && [ -e "$run_dir/logs/$job.$restart.$try" ]; do :; done
        life="$job.$restart.$try" life_dir="$run_dir/logs/$life"
        # two ports of its own for each life: what is left of an earlier one must not be met
        port=$((first_port + 2 * ((try - 1) % 100)))
        run mkdir -p "$life_dir"
        run rm -f "$run_dir/exit.json" "$run_dir/STOP"
        [ -n "$counter${DRY:-}" ] || start_counting
        find_healthy
        [ -z "$end_asked" ] || finish 143 "ended by $end_asked"
        [ -z "$stop_asked" ] || again "asked to stop before the start (a time limit shorter than --signal asks for?)"
        [ ${#healthy[@]} -ge "$need" ] || again "${#healthy[@]} nodes are left of $need"
        saved="$(newest)"
        launch "$@"
        [ -z "${DRY:-}" ] || exit 0
        watch "$@"
        case "$outcome" in
            'done') finish 0 "the run is complete" ;;
            mistake) finish $EXIT_MISTAKE "a mistake, which no other try would mend" ;;
            stopped)
                [ -n "$stop_asked" ] || finish 0 "stopped by $run_dir/STOP; the same command goes on"
                again "stopped at step $(read_step)"
                ;;
        esac
        # asked for by hand, and the trainers failed before they saw it
        [ ! -e "$run_dir/STOP" ] || [ -n "$stop_asked" ] || finish 0 "stopped by STOP, after a fault; the same command goes on"
        failures=$((failures + 1))
        [ "$(newest)" = "$saved" ] || failures=1
        step="$(read_step)"
        [ "${step:-0}" -le "$furthest" ] || failures=1 furthest="$step"
        [ "$failures" -le "$retries" ] || finish $EXIT_FAULT "$failures launches in a row have failed"
    done
}

# Has the run directory for this job: of two in one directory each would take the other's STOP and exit.json for its own.
claim() {
    local file="$run_dir/logs/job" other
    other="$(cat "$file" 2>/dev/null)" || true
    if [ -n "$other" ] && [ "$other" != "$own" ] &&
        [ -n "$(squeue --noheader --jobs="$other" --states=RUNNING,SUSPENDED 2>/dev/null || true)" ]; then
        printf 'error: run.dir: job %s is using %s\n  remedy: %s\n' "$other" "$run_dir" \
            "scancel it, wait for it (sbatch --dependency=afterany:$other), or use another directory" >&2
        exit $EXIT_MISTAKE
    fi
    mkdir -p "$run_dir/logs"
    echo "$own" >"$file"
}

# The trainers see the file at the end of a step, save and end.
ask_to_stop() {
    [ -z "$stop_asked" ] || return 0
    tick
    stop_asked=$SECONDS
    say "asked to stop: the run saves at the end of this step"
    # where there is no run directory yet, nothing has been started
    [ -z "$run_dir" ] || : >"$run_dir/STOP" || true
}

end_all() {
    [ -z "$counter" ] || kill "$counter" 2>/dev/null || true
    cancel_all
}

finish() { # STATUS WHY
    say "$2"
    end_all
    trap - EXIT
    exit "$1"
}

# Leaves the rest to another life of the job, if it is one that Slurm can start again and this one left more than it found.
again() { # WHY
    local status=$EXIT_FAULT
    [ -z "$stop_asked" ] || status=0
    if [ "${ENVIRONMENT:-}" != BATCH ] || [[ "$(scontrol -o show job "$own" || true)" == *" Requeue=0 "* ]]; then
        finish "$status" "$1; the same command goes on from the newest checkpoint"
    elif [ "$(newest)" = "$first_saved" ] && [ "$restart" -ge "$retries" ]; then
        finish $EXIT_FAULT "$1, and no checkpoint was written since the last restart: not requeued"
    fi
    say "$1; requeued"
    end_all
    trap - EXIT
    for _ in {1..30}; do # Slurm's controller may be away
        if scontrol requeue "$own"; then break; fi # which kills this script
        nap 20
    done
    sleep 60
    exit $EXIT_FAULT
}
