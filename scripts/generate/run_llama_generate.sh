#!/usr/bin/env bash
# Continues a prompt with a trained model; by default with the newest one of scripts/run_train.sh.
#
#   scripts/generate/run_llama_generate.sh --prompt="Return a list" [options]
#
# --prompt=TEXT_OR_FILE   the text, or a file that holds it
# PROMPT          the same, where there is no --prompt
# CHECKPOINT_DIR  step folder, folder of these, or of a run (default ./outputs)
# CONFIG_FILE     TOML file (default: the model's config.json, or what its run recorded)
# NGPU            processes (default 1; more are not available yet)
# PYTHON, VENV    see scripts/setup_env.sh
# Other options go to `torchtitan generate`, whose --help lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup_env.sh
prepare_python ""

NGPU="${NGPU:-1}"
CHECKPOINT_DIR="${CHECKPOINT_DIR:-./outputs}"
prompt="${PROMPT:-}"

options=()
for argument in "$@"; do
  case "$argument" in
    --prompt=*) prompt="${argument#--prompt=}" ;;
    *) options+=("$argument") ;;
  esac
done
if [ -f "$prompt" ]; then
  prompt="$(cat "$prompt")"
fi

# Where there is more than one process, the program says that it cannot.
[ "$NGPU" = 1 ] || export WORLD_SIZE="$NGPU"
exec "$PYTHON" -m scripts.generate.test_generate ${CONFIG_FILE:+--config="$CONFIG_FILE"} \
  --checkpoint="$CHECKPOINT_DIR" --prompt="$prompt" ${options[@]+"${options[@]}"}
