#!/usr/bin/env bash
# The recipe on one CPU core, all of it: makes chats and a small Hugging Face model, fine-tunes the
# model on the chats, and counts its exact answers to held-out chats before and after.
#
#   bash examples/sft/run.sh [config overrides of fine-tuning]       e.g. --training.epochs 2
#
# SEEDS        seeds to run all of it with (default 0; three: "0 1 2")
# OUT          where everything goes (default outputs/sft)
# NUM_TRAIN, NUM_HELD_OUT, BASE_STEPS
#              chats, and steps of the base model (default 4000, 200, and those of base.toml)
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup_env.sh
prepare_python ""
export VENV=none PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NGPU=1

OUT="${OUT:-outputs/sft}"
BASE_STEPS="${BASE_STEPS:-$(sed -n 's/^steps = \([0-9]*\).*/\1/p' examples/sft/base.toml)}"

for seed in ${SEEDS:-0}; do
  folder="$OUT/seed_$seed" data="$OUT/seed_$seed/data"
  "$PYTHON" -m examples.sft.make_data --out "$data" --seed "$seed" \
    --num-train "${NUM_TRAIN:-4000}" --num-held-out "${NUM_HELD_OUT:-200}"
  CONFIG_FILE=examples/sft/base.toml scripts/run_train.sh \
    --job.dump_folder "$folder/base" --debug.seed "$seed" --training.steps "$BASE_STEPS" \
    --model.hf_config "$data/model" --model.hf_assets_path "$data/model" \
    --training.dataset_path "$data/questions.jsonl"
  base="$folder/base/checkpoint/step-$BASE_STEPS"
  CONFIG_FILE=examples/sft/cpu.toml scripts/run_train.sh \
    --job.dump_folder "$folder/tuned" --debug.seed "$seed" --training.data_seed "$seed" \
    --model.hf_config "$base" --model.hf_assets_path "$base" \
    --training.dataset_path "$data/train.jsonl" \
    --validation.dataset_path "$data/held_out.jsonl" "$@"
  tuned="$(ls -d "$folder"/tuned/checkpoint/step-* | sort -V | tail -n 1)"
  "$PYTHON" -m examples.sft.evaluate "$data/held_out.jsonl" "$base" "$tuned"
done
