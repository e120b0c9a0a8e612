#!/usr/bin/env bash
# All that only a GPU can show, with one command: tests, waits for the device, and speed.
#
#   scripts/run_gpu_book.sh OUT [--full] [--dry-run] [--only SECTION ...]
#
# OUT          folder for book.json, book.md and book.log, the output of all sections
# --full       every test and every variant: about an hour, instead of under 9 minutes
# --dry-run    the sections in small, without a GPU
# WHEELS       folder of wheels (scripts/make_gpu_wheels.sh), for machines without a package index: all of
#              them are installed into a folder of its own, and $PYTHON is used as it is
# PYTHON, VENV see scripts/setup_env.sh
# The book ends at once if a package is missing, and names it. Sections go on after failures; the exit code
# is 1 if one failed, and 0 where there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${WHEELS:-}" ]; then
  PYTHON="${PYTHON:-python3}" VENV=none
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
source scripts/setup_env.sh
prepare_python dev

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
"$PYTHON" benchmarks/gpu_book.py "$@"
