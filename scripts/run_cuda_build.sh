#!/usr/bin/env bash
# Runs a CUDA build of torch on a machine without a GPU: tests/cuda_build/standin.cpp stands in for the driver.
#
#   scripts/run_cuda_build.sh [peaks] [waits] [tests] [book]       all four by default
#   scripts/run_cuda_build.sh -- COMMAND ...                       any command, e.g. python -m torchtitan.train
#
# peaks        memory of the throughput benchmark's models, and of 8B on one rank of eight
# waits        where a step of each case of the rehearsal waits, as CUDA's debug mode reports it
# tests        the tests of tests/gpu that need no numbers: waits, recompilations, memory
# book         scripts/run_gpu_book.sh, whose figures and most of whose failures then mean nothing
# OUT          folder of the results (default outputs/cuda_build)
# TORCH, PYTHON, VENV   see scripts/setup_env.sh; VENV is .venv-cuda by default, and takes 9 GB
# Needs Linux on x86-64 and g++. See docs/gpu.md for what this shows and what it doesn't.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
VENV="$(realpath -m "${VENV:-.venv-cuda}")" OUT="${OUT:-outputs/cuda_build}"
mkdir -p "$OUT"
(
  # pip would prefer a CPU build of the same version, wherever these settings name one.
  unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
  PIP_CONFIG_FILE=/dev/null prepare_python dev
)
# Not where a GPU's kernels are kept: what is tuned here is not tuned for speed.
export TORCHINDUCTOR_CACHE_DIR="$VENV/inductor" TRITON_CACHE_DIR="$VENV/triton"
export PATH="$VENV/bin:$PATH" PYTHON="$VENV/bin/python" VENV=none

site="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
standin="$(mktemp -d)"
trap 'rm -rf "$standin"' EXIT
# CUDA's headers, and those that torch's packages leave out.
g++ -std=c++17 -O1 -Wall -shared -fPIC -isystem "$site/nvidia/cu13/include" \
  -isystem "$site/triton/backends/nvidia/include" -Wl,-soname,libcuda.so.1 \
  -o "$standin/libcuda.so.1" tests/cuda_build/standin.cpp
# torch looks for NVRTC and NVML under these names.
ln -s libcuda.so.1 "$standin/libnvrtc.so.13"
ln -s libcuda.so.1 "$standin/libnvidia-ml.so.1"

export LD_LIBRARY_PATH="$standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" TRITON_LIBCUDA_PATH="$standin"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

under() {
  LD_PRELOAD="libcuda.so.1 libnvrtc.so.13 libnvidia-ml.so.1" "$@"
}

throughput() {  # NAME ARGUMENTS...
  under python benchmarks/throughput.py --blocks 1 --steps 2 --json "$OUT/$1.json" "${@:2}"
}

if [ "${1:-}" = -- ]; then
  under "${@:2}"
  exit
fi
failed=()
[ $# -gt 0 ] || set -- peaks waits tests book
for part in "$@"; do
  case "$part" in
    peaks)
      for rows in 1 2; do throughput "peaks_$rows" --rows "$rows" || failed+=(peaks); done
      NGPU=8 throughput peaks_8B --models 8B --rows 1 --attn-types flex --override \
        comm.mode=fake_backend activation_checkpoint.mode=selective \
        activation_checkpoint.selective_ac_option=op || failed+=(peaks)
      ;;
    waits) under python benchmarks/device_waits.py --json "$OUT/waits.json" || failed+=(waits) ;;
    tests)
      under python -m pytest -q -p no:cacheprovider -p tests.gpu.untuned tests/gpu \
        -k "recompile or compiles_nothing or memory_does_not_grow or where_it_was_put" || failed+=(tests)
      ;;
    book) under scripts/run_gpu_book.sh "$OUT/book" || true ;; # its tests of numbers fail
    *) echo "unknown part $part" >&2 && exit 2 ;;
  esac
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
