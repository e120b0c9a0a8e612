#!/usr/bin/env bash
# Trains; by default the debug model on the documentation that this Python carries.
#
#   scripts/run_train.sh [config overrides]        e.g. --training.steps 50
#
# NGPU         processes to start (default 1; on a machine without GPUs they run on CPU)
# CONFIG_FILE  TOML file (default torchtitan/models/llama3/train_configs/python_docs.toml), relative to
#              the folder that the script is called from. Called from a folder of your own, the run
#              works there: its modules are found, and relative paths in the config begin there.
# LOG_RANK     ranks whose console output is shown (default 0)
# TRAIN_FILE   module to run (default torchtitan.train)
# COMM_MODE    fake_backend or local_tensor: one process, NGPU simulated, one step
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
prepare_python ""

NGPU="${NGPU:-1}"
export NGPU LOG_RANK="${LOG_RANK:-0}"
CONFIG_FILE="${CONFIG_FILE:-$PWD/torchtitan/models/llama3/train_configs/python_docs.toml}"
cd "$caller"
TRAIN_FILE="${TRAIN_FILE:-torchtitan.train}"
COMM_MODE="${COMM_MODE:-}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# Tensors on the CPU get huge pages where the system has them: fewer page faults (glibc 2.35 and newer).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

if [ -n "$COMM_MODE" ]; then
  export LOCAL_RANK=0
  exec "$PYTHON" -m "$TRAIN_FILE" --job.config_file "$CONFIG_FILE" "$@" \
    --comm.mode="$COMM_MODE" --training.steps=1
elif [ "$NGPU" = 1 ]; then
  exec "$PYTHON" -m "$TRAIN_FILE" --job.config_file "$CONFIG_FILE" "$@"
else
  # Each process computes with its share of the cores.
  if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
    export OMP_NUM_THREADS=$((cores / NGPU > 0 ? cores / NGPU : 1))
  fi
  exec "$PYTHON" -m torchtitan.tools.launch --nproc-per-node="$NGPU" \
    --rdzv-backend c10d --rdzv-endpoint=localhost:0 \
    --local-ranks-filter="$LOG_RANK" --role rank --tee 3 \
    -m "$TRAIN_FILE" --job.config_file "$CONFIG_FILE" "$@"
fi
