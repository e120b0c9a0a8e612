#!/usr/bin/env bash
# Trains; by default the debug model on the documentation that this Python carries.
#
#   scripts/run_train.sh [config overrides]        e.g. --training.steps 50
#
# NGPU         processes to start (default 1; on a machine without GPUs they run on CPU)
# CONFIG_FILE  TOML file (default: the job that ends with a model in outputs/model), relative to the
#              folder that the script is called from. Called from a folder of your own, the run
#              works there: its modules are found, and relative paths in the config begin there.
# LOG_RANK     ranks whose console output is shown (default 0; all: every rank)
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
cd "$caller"
if [ -n "${CONFIG_FILE:-}" ]; then
  TRAIN_FILE="${TRAIN_FILE:-torchtitan.train}"
  set -- --job.config_file "$CONFIG_FILE" "$@"
fi
TRAIN_FILE="${TRAIN_FILE:-torchtitan.commands.train}" # which has the default job
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# Tensors on the CPU get huge pages where the system has them: fewer page faults (glibc 2.35 and newer).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

if [ -n "${COMM_MODE:-}" ]; then
  export LOCAL_RANK=0
  exec "$PYTHON" -m "$TRAIN_FILE" "$@" --comm.mode="$COMM_MODE" --training.steps=1
elif [ "$NGPU" = 1 ]; then
  exec "$PYTHON" -m "$TRAIN_FILE" "$@"
else
  exec "$PYTHON" -c 'import sys; from torchtitan.commands import start_ranks as start
start(sys.argv[1], int(sys.argv[2]), sys.argv[3:])' "$TRAIN_FILE" "$NGPU" "$@"
fi
