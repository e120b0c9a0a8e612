#!/usr/bin/env bash
# Starts one node's processes of a job on several nodes: run it on each of them, in any order.
#
#   NNODES=2 MASTER=node0:29500 scripts/launch/multi_node.sh [config overrides]
#
# NNODES        nodes of the job, or MIN:MAX: then it goes on with fewer when one dies
# MASTER        host[:port] of one of these nodes, where they meet
# JOB_ID        the same on all nodes, another one for each job (default torchtitan)
# NGPU          processes on this node (default: one for each GPU, 1 without any)
# CONFIG_FILE   TOML file (default torchtitan/models/llama3/train_configs/python_docs.toml)
# TRAIN_FILE    module to run (default torchtitan.train)
# MAX_RESTARTS  how often all ranks start again, from the newest checkpoint, after one failed or
#               a node came or went (default 10)
# LOG_DIR       each rank's output, one folder for each attempt (default ./outputs/logs)
# LOG_RANK      ranks of this node whose output is shown besides (default 0)
# DRY_RUN=1     print the command and stop
# PYTHON, VENV  see scripts/setup_env.sh
#
# The network's own settings come from the environment. Often needed:
#   NCCL_SOCKET_IFNAME=eth0    the interface that nodes reach each other by (GLOO_SOCKET_IFNAME too)
#   NCCL_IB_HCA=mlx5           InfiniBand adapters
#   FI_PROVIDER=efa            AWS EFA, with the aws-ofi-nccl plugin installed
#   NCCL_DEBUG=INFO            says at the start which of them is in use: look for it once
set -euo pipefail

: "${NNODES:?set NNODES to the number of nodes}"
: "${MASTER:?set MASTER to host[:port] of one of the nodes}"
launch_folder="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
prepare_python ""

if [ -z "${NGPU:-}" ]; then
  NGPU="$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
LOG_DIR="$(cd "$launch_folder" && realpath -m "${LOG_DIR:-outputs/logs}")"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

command=(
  "$PYTHON" -m torch.distributed.run
  --nnodes "$NNODES" --nproc-per-node "$NGPU"
  --rdzv-backend c10d --rdzv-endpoint "$MASTER" --rdzv-id "${JOB_ID:-torchtitan}"
  # A node may boot, or wait for its turn, for a while.
  --rdzv-conf join_timeout=1800
  --max-restarts "${MAX_RESTARTS:-10}"
  --log-dir "$LOG_DIR" --tee 3 --local-ranks-filter "${LOG_RANK:-0}" --role rank
  -m "${TRAIN_FILE:-torchtitan.train}"
  --job.config_file "${CONFIG_FILE:-torchtitan/models/llama3/train_configs/python_docs.toml}" "$@"
)
# Each rank's file gets all of its lines; the filter above chooses what is shown.
export LOG_RANK=all
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
mkdir -p "$LOG_DIR"
exec "${command[@]}"
