#!/usr/bin/env bash
# The recipe on one CPU core, all of it: makes word problems and a tokenizer, fine-tunes a small
# Qwen 3 on them for a short while, and goes on from there with RL.
#
#   examples/rl/word_problems/run_cpu.sh [config overrides of RL]     e.g. --training.steps 50
#
# SEEDS        seeds to run all of it with (default 0; three: "0 1 2")
# OUT          where everything goes (default outputs/rl/word_problems)
# SFT_STEPS    fine-tuning steps (default: those of sft_cpu.toml)
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/setup_env.sh
prepare_python ""
export VENV=none PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NGPU=1

HERE=examples/rl/word_problems
OUT="${OUT:-outputs/rl/word_problems}"
SFT_STEPS="${SFT_STEPS:-$(sed -n 's/^steps = \([0-9]*\).*/\1/p' "$HERE/sft_cpu.toml")}"

for seed in ${SEEDS:-0}; do
  folder="$OUT/seed_$seed" data="$OUT/seed_$seed/data"
  "$PYTHON" -m examples.rl.word_problems.make_data --out "$data" --seed "$seed"
  for part in train held_out; do
    "$PYTHON" -m examples.rl.word_problems.render --template plain \
      "$data/$part.jsonl" "$data/${part}_rendered.jsonl"
  done
  CONFIG_FILE="$HERE/sft_cpu.toml" scripts/run_train.sh \
    --job.dump_folder "$folder/sft" --debug.seed "$seed" --training.steps "$SFT_STEPS" \
    --model.hf_assets_path "$data/tokenizer" \
    --training.dataset_path "$data/train_rendered.jsonl"
  TRAIN_FILE=torchtitan.rl.train CONFIG_FILE="$HERE/rl_cpu.toml" scripts/run_train.sh \
    --job.dump_folder "$folder/rl" --debug.seed "$seed" --rl.seed "$seed" \
    --model.hf_assets_path "$data/tokenizer" \
    --rl.task.path "$data/train_rendered.jsonl" \
    --rl.task.eval_path "$data/held_out_rendered.jsonl" \
    --checkpoint.initial_load_path "$folder/sft/checkpoint/step-$SFT_STEPS" "$@"
done
