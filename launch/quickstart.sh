#!/usr/bin/env bash
# From an empty clone to a trained model: bash launch/quickstart.sh [key.path=value ...]
# Sets itself up, warm-starts a tiny MoE model, trains it with GSPO on 2 trainer ranks and 1 rollout rank, and asks the
# exported model prompts that it never saw. RUN_DIR=DIR says where the run goes (default runs/quickstart).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run_dir="${RUN_DIR:-runs/quickstart}"
bash launch/setup.sh
# shellcheck source=launch/python.sh
source launch/python.sh
export OMP_NUM_THREADS=1

echo "1. the task: sort digits; a tiny model that is right one time in five"
"$python" tools/make_sort_task.py --out runs/sort-task
echo "2. training"
bash launch/torchrun.sh configs/tiny/gspo_moe.yaml "run.dir=$run_dir" "$@"
echo "3. the exported model, through transformers, on prompts that it never saw"
"$python" tools/ask.py --model "$run_dir/export" --prompts runs/sort-task/heldout.jsonl --count 5
echo
echo "reward curve   $run_dir/reward.png"
echo "TensorBoard    $venv/bin/tensorboard --logdir $run_dir/tensorboard"
echo "checkpoint     $run_dir/export (Hugging Face)"
echo "samples        $run_dir/rollouts, metrics $run_dir/metrics.jsonl"
echo "next           README.md, \"A run of your own\""
