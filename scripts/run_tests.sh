#!/usr/bin/env bash
# Runs the tests; sets up a virtual environment on the first run.
#
#   scripts/run_tests.sh [pytest arguments]        e.g. tests/unit -k tokenizer
#
# NPROC        test files run at the same time (default 1)
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
prepare_python dev

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "${NPROC:-1}" != 1 ]; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # more would wait for each other's cores
  # Files in their order, unit tests last: by default those with few tests, which may be long, end the run.
  set -- -n "$NPROC" --dist loadfile --no-loadscope-reorder "$@"
fi
exec "$PYTHON" -m pytest "$@"
