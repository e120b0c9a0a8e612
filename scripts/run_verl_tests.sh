#!/usr/bin/env bash
# Runs tests/verl; sets up a virtual environment with verl on the first run, beside that of the other
# tests: verl 0.9.1 wants an older transformers than they have.
#
#   scripts/run_verl_tests.sh [pytest arguments]        e.g. -k checkpoint
#
# VENV         where it goes (default .venv-verl); VENV=none uses $PYTHON as it is
# PYTHON       see scripts/setup_env.sh; verl needs 3.11 or 3.12
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
for candidate in python3.12 python3.11; do
  [ -n "${PYTHON:-}" ] || ! "$candidate" -c "" 2>/dev/null || PYTHON="$candidate"
done
VENV="${VENV:-$PWD/.venv-verl}" CONSTRAINTS=constraints-verl.txt prepare_python verl-test

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest tests/verl "$@"
