#!/usr/bin/env bash
# Makes a folder of wheels for a GPU machine without a package index; scripts/run_gpu_book.sh installs from it.
#
#   scripts/make_gpu_wheels.sh FOLDER [NAME[==VERSION] ...]
#
# NAME            what that machine lacks; default: what an image with Python 3.12, torch 2.11, transformers
#                 and pytest lacked. Nothing is added that these need: the book names what is still missing.
# PYTHON_VERSION  of that machine (default 3.12), which has Linux on x86-64
# PYTHON          whose pip downloads (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:?usage: scripts/make_gpu_wheels.sh FOLDER [NAME ...]}"
shift
if [ $# = 0 ]; then
  set -- torchdata datasets dill==0.4.0 multiprocess==0.70.16 tomli tomli_w \
    tyro docstring_parser==0.18.0 typeguard==4.6.1 torchao trl
fi
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
exec "${PYTHON:-python3}" -m pip download --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
  --constraint constraints.txt --dest "$folder" "$@"
