#!/usr/bin/env bash
# Runs the tests; sets up a virtual environment on the first run.
#
#   scripts/run_tests.sh [pytest arguments]        e.g. tests/unit -k tokenizer
#
# NPROC        pytest processes (default 1: the distributed tests start their own)
# PYTHON, VENV see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
prepare_python dev

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest "$@"
