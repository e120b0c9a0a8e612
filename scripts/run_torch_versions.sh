#!/usr/bin/env bash
# Runs what CI runs with each of these versions of torch, and ends with one line per version.
#
#   scripts/run_torch_versions.sh VERSION ... [-- pytest arguments]      e.g. 2.11.0 2.15.0 -- tests/unit
#
# NPROC   test files run at the same time (default 3)
# PYTHON  see scripts/setup_env.sh
# Each version gets an environment of its own, .venv-torch-VERSION, which is removed afterwards: pip keeps
# no copy either, because a CUDA build and its libraries take 6 GB. The exit code is 1 if a test failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  versions+=("$1")
  shift
done
shift || true # the --
: "${versions[0]:?usage: scripts/run_torch_versions.sh VERSION ... [-- pytest arguments]}"
export PIP_NO_CACHE_DIR="${PIP_NO_CACHE_DIR:-1}"
log="$(mktemp)" venv=
trap 'rm -rf "$log" ${venv:+"$venv"}' EXIT
results=() code=0
for version in "${versions[@]}"; do
  venv="$PWD/.venv-torch-$version"
  rm -rf "$venv"
  TORCH="$version" VENV="$venv" .ci/run "$@" 2>&1 | tee "$log" || code=1
  # pytest's last line, e.g. "== 2 failed, 4870 passed, 10 skipped in 612.40s (0:10:12) =="
  counts="$(sed -nE 's/^=* ?([0-9]+ (passed|failed|skipped|error).* in [0-9][^=]*[^= ]) ?=*$/\1/p' "$log" | tail -n 1)"
  results+=("torch $version: ${counts:-the tests did not run}")
  rm -rf "$venv"
done
printf '%s\n' "${results[@]}"
exit "$code"
