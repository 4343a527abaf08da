#!/usr/bin/env bash
# guard.sh FILE SECONDS: requeues the job when FILE, in which the batch script counts, has not changed for so long.
# It runs on another node than the batch script. A job with --no-kill goes on without that node, and Slurm does not
# notice that nothing is left there to look after it.
set -euo pipefail
file="$1" limit="$2" last='' since=$SECONDS
while sleep 2; do
    now="$(cat "$file" 2>/dev/null || true)"
    if [ "$now" != "$last" ]; then
        last="$now" since=$SECONDS
    elif [ $((SECONDS - since)) -ge "$limit" ]; then
        echo "the batch script has been silent for $limit s: requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
        since=$SECONDS
    fi
done
