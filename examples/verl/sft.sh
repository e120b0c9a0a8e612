#!/usr/bin/env bash
# Fine-tunes with verl's SFT trainer on our engine; runs on a laptop's CPU.
#
#   python examples/verl/toy.py /tmp/toy
#   examples/verl/sft.sh /tmp/toy [verl settings]
#   NPROC=2 examples/verl/sft.sh /tmp/toy engine.tensor_parallel_size=2
#   ENGINE=fsdp examples/verl/sft.sh /tmp/toy          the same by verl's own FSDP engine
#
# Each run starts from the model and replaces the checkpoints of the one before; to go on with these:
# trainer.resume_mode=auto.
#
# On GPUs: trainer.device=cuda, and engine.dtype, engine.use_torch_compile as they are by default.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" VERL_USE_EXTERNAL_MODULES=verl_on_cpu.register
folder="$1"
shift
settings=(engine=torchtitan optim=torchtitan engine.dtype=float32)
if [ "${ENGINE:-torchtitan}" = fsdp ]; then
  export VERL_ENGINE_DEVICE=cuda  # verl has registered this engine for accelerators only
  settings=(
    engine=fsdp optim=fsdp engine.strategy=fsdp2 +model.override_config.attn_implementation=sdpa
    +engine.mixed_precision.param_dtype=fp32 +engine.mixed_precision.reduce_dtype=fp32
  )
fi
exec torchrun --standalone --nproc_per_node="${NPROC:-1}" -m verl.trainer.sft_trainer \
  "${settings[@]}" engine.use_torch_compile=false \
  model.path="$folder/model" \
  data.train_files="$folder/sums/train.parquet" data.val_files="$folder/sums/val.parquet" \
  data.train_batch_size=8 data.max_length=128 data.max_token_len_per_gpu=160 data.num_workers=0 \
  optim.lr=1e-3 optim.lr_warmup_steps=2 \
  trainer.device=cpu 'trainer.logger=[console]' trainer.default_local_dir="$folder/checkpoints/sft" \
  trainer.resume_mode=disable \
  hydra.run.dir="$folder/hydra" \
  trainer.total_epochs=3 trainer.total_training_steps=20 trainer.test_freq=5 \
  "$@"
