#!/usr/bin/env bash
# Reinforcement learning on two CPU cores: copies three letters from random weights, and lifts sums
# of two digits from a checkpoint that it pre-trains. One thread per run.
#
#   scripts/run_rl.sh [config overrides]           e.g. --training.steps 50
#
# SEEDS        seeds to run both tasks with (default 0; three: "0 1 2")
# TASKS        default "copy_cpu sum_digits_cpu"
# NGPU         processes per run (default 1)
# OUT          where the runs go (default outputs/rl)
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
prepare_python ""
export VENV=none PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NGPU="${NGPU:-1}"

OUT="${OUT:-outputs/rl}"
CONFIGS=torchtitan/rl/train_configs

for seed in ${SEEDS:-0}; do
  for task in ${TASKS:-copy_cpu sum_digits_cpu}; do
    overrides=(--debug.seed "$seed" --rl.seed "$seed")
    if [ "$task" = sum_digits_cpu ]; then
      start="$OUT/sum_digits_pretrain/seed_$seed"
      NGPU=1 CONFIG_FILE="$CONFIGS/sum_digits_pretrain.toml" scripts/run_train.sh \
        --job.dump_folder "$start" "${overrides[@]}"
      overrides+=(--checkpoint.initial_load_path "$start/checkpoint/step-110")
    fi
    TRAIN_FILE=torchtitan.rl.train CONFIG_FILE="$CONFIGS/$task.toml" scripts/run_train.sh \
      --job.dump_folder "$OUT/$task/seed_$seed" "${overrides[@]}" "$@"
  done
done

"$PYTHON" scripts/rl_curves.py --out "$OUT/curves.svg" \
  $(for task in ${TASKS:-copy_cpu sum_digits_cpu}; do echo "$task=$OUT/$task/seed_*"; done)
