#!/usr/bin/env bash
# Qwen3-0.6B learns GSM8K: renders the data and trains as qwen3_0.6b.toml says. It has not been run on
# a GPU yet.
#
# Once, on each node or in a folder that they share:
#   pip install vllm
#   hf download Qwen/Qwen3-0.6B --local-dir assets/hf/Qwen3-0.6B
#   # GSM8K's train.jsonl and test.jsonl, from grade_school_math/data of github.com/openai/grade-school-math
#
# One GPU:
#   DATA=gsm8k examples/rl/word_problems/run_qwen3.sh [config overrides]
# Two nodes of 8 GPUs, on each of them: the first trains, the second generates.
#   NNODES=2 MASTER=node0:29500 DATA=gsm8k examples/rl/word_problems/run_qwen3.sh [config overrides]
#
# DATA         folder with train.jsonl and test.jsonl, whose lines have `question` and `answer`
# NNODES, NGPU  nodes, and processes of a node (default 8 on several nodes)
# MASTER       host[:port] of the first node
# DRY_RUN=1    print the command of a node and stop
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
: "${DATA:?set DATA to the folder that has train.jsonl and test.jsonl}"
DATA="$(realpath "$DATA")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/setup_env.sh
prepare_python ""
export VENV=none PYTHON TRAIN_FILE=torchtitan.rl.train
export CONFIG_FILE=examples/rl/word_problems/qwen3_0.6b.toml

for part in train test; do # where the config looks for them
  "$PYTHON" -m examples.rl.word_problems.render --template qwen3 \
    "$DATA/$part.jsonl" "outputs/rl/qwen3_0.6b/data/$part.jsonl"
done
if [ -z "${NNODES:-}" ]; then
  NGPU=1 exec scripts/run_train.sh "$@"
fi
# The last ranks, a node's worth, only generate; they have their GPUs to themselves.
command="$("$PYTHON" -m torchtitan launch torchrun --config "$CONFIG_FILE" --nodes "$NNODES" \
  --gpus-per-node "${NGPU:-8}" --head "${MASTER:?set MASTER to the first node}" \
  --rl.generator.ranks "${NGPU:-8}" --rl.generator.memory_share 0.85 --rl.async_steps 1 "$@")"
[ -z "${DRY_RUN:-}" ] || { echo "$command"; exit; }
exec bash -c "exec $command"
