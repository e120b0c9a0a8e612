#!/usr/bin/env bash
# tinker-cookbook's own SFT and RL programs, unchanged, on a policy of this machine that sees sums.
# Five minutes on one CPU core. Run it from the root of the repository.
#
#   pip install tinker tinker-cookbook math-verify pylatexenc sympy     # may be another environment
#   TINKER_PYTHON=/path/to/its/bin/python examples/rl/tinker_cookbook/run.sh outputs/tinker_cookbook
#
# SERVER_FLAGS="--model.converters=lora --lora.rank=32" trains adapters of the programs' default rank.
set -euo pipefail

repository=$PWD folder=${1:-outputs/tinker_cookbook} python=${TINKER_PYTHON:-python} port=${PORT:-8000}
mkdir -p "$folder" && cd "$folder"
export TINKER_API_KEY=tml-local TINKER_TELEMETRY=0 HF_HUB_OFFLINE=1
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
python "$repository/examples/rl/tinker_cookbook/assets.py" .
python -m torchtitan.rl.serve --job.config_file "$repository/examples/rl/tinker_cookbook/serve.toml" \
    --job.dump_folder served --rl.serve.port "$port" ${SERVER_FLAGS:-} > server.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until grep -q "serving local/bytes" server.log; do kill -0 $server; sleep 0.5; done

common=(model_name=local/bytes renderer_name=role_colon base_url="http://127.0.0.1:$port"
    save_every=0 eval_every=0 behavior_if_log_dir_exists=delete)
"$python" -m tinker_cookbook.recipes.chat_sl.train "${common[@]}" log_path=sft dataset=sums.jsonl \
    train_on_what=last_assistant_message batch_size=64 learning_rate=3e-3 max_length=128 \
    max_steps="${SFT_STEPS:-40}"
sleep 13  # the programs do not say that they end; see "Clients that end" in docs/rl_serve.md
state=$(python -c "import json; print(json.loads(open('sft/checkpoints.jsonl').read().splitlines()[-1])['state_path'])")
"$python" -m tinker_cookbook.recipes.math_rl.train "${common[@]}" log_path=rl env=arithmetic \
    load_checkpoint_path="$state" groups_per_batch=16 group_size=8 learning_rate=1e-3 max_tokens=12 \
    max_steps="${RL_STEPS:-30}"
