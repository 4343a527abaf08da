#!/usr/bin/env bash
# guard.sh FILE SECONDS JOB: requeues the job when FILE, in which the batch script counts, has not changed for so long.
# It runs on another node than the batch script. A job with --no-kill goes on without that node, and Slurm does not
# notice that nothing is left there to look after it.
set -euo pipefail
uptime() { cut -d . -f 1 /proc/uptime; } # bash's SECONDS follow the wall clock, which may be set
file="$1" limit="$2" job="$3" last='' since="$(uptime)"
while sleep 2; do
    seconds="$(uptime)"
    now="$(cat "$file" 2>/dev/null || true)"
    if [ "$now" != "$last" ]; then
        last="$now" since=$seconds
    elif [ $((seconds - since)) -ge "$limit" ]; then
        echo "the batch script has been silent for $limit s: requeueing job $job"
        # Slurm's controller may be away: nobody else would ask again
        if scontrol requeue "$job"; then since=$seconds; else sleep 10; fi
    fi
done
