#!/usr/bin/env bash
# Estimates what a step of a job needs and sends on each device, in one process without any.
#
#   scripts/estimate/run_memory_estimation.sh [config overrides]
#
# NGPU, NNODES    the job has NGPU * NNODES ranks (default 8 * 1)
# CONFIG_FILE     TOML file (default torchtitan/models/llama3/train_configs/llama3_8b.toml)
# PYTHON, VENV    see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup_env.sh
prepare_python ""

NGPU="${NGPU:-8}"
NNODES="${NNODES:-1}"
CONFIG_FILE="${CONFIG_FILE:-torchtitan/models/llama3/train_configs/llama3_8b.toml}"
export NGPU=$((NGPU * NNODES)) LOCAL_RANK=0

exec "$PYTHON" -m scripts.estimate.estimation --job.config_file "$CONFIG_FILE" \
  --memory_estimation.enable "$@"
