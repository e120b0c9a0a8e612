#!/usr/bin/env bash
# GRPO by verl's own main_ppo on a laptop's CPU, with our engine and the rollout in verl_on_cpu: 20 steps of the toy
# task beside this file, about two minutes on two cores.
#
#   examples/verl/grpo.sh [FOLDER] [more settings of verl, such as trainer.total_training_steps=5]
#
# Two training processes, FSDP over both, and a rollout beside each:
#
#   examples/verl/grpo.sh FOLDER trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_gpus=2 \
#     actor_rollout_ref.actor.torchtitan.data_parallel_shard_size=2
#
# PPO, with a critic that begins as the policy's body:
#
#   examples/verl/grpo.sh FOLDER algorithm.adv_estimator=gae
#
# With a KL term to the model that training began with:
#
#   examples/verl/grpo.sh FOLDER actor_rollout_ref.actor.use_kl_loss=True
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" VERL_USE_EXTERNAL_MODULES=verl_on_cpu.register
folder="${1:-./outputs/grpo}"
shift || true
PYTHON="${PYTHON:-python}"
[ -e "$folder/vowels" ] || "$PYTHON" "$here/toy.py" "$folder"

settings=(
  model_engine=torchtitan
  # One process of everything: each of Ray's processes costs half a gigabyte.
  trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1
  +ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=8
  +ray_kwargs.ray_init.object_store_memory=268435456
  +ray_kwargs.ray_init.include_dashboard=False
  actor_rollout_ref.rollout.agent.num_workers=1
  reward.num_workers=1
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
  # the task
  algorithm.adv_estimator=grpo
  data.train_files="$folder/vowels/train.parquet" data.val_files="$folder/vowels/val.parquet"
  data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=12
  data.dataloader_num_workers=0
  reward.custom_reward_function.path="$here/toy.py"
  reward.custom_reward_function.name=compute_score
  # the trainer
  actor_rollout_ref.model.path="$folder/model"
  actor_rollout_ref.actor.optim.lr=3e-3
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
  actor_rollout_ref.actor.use_kl_loss=False
  actor_rollout_ref.actor.torchtitan.dtype=float32
  actor_rollout_ref.actor.torchtitan.use_torch_compile=False
  actor_rollout_ref.actor.torchtitan.attn_type=varlen
  # the reference, of runs with a KL term
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64
  # the critic, of estimators that have one
  critic.model.path="$folder/model"
  critic.optim.lr=1e-3
  critic.ppo_mini_batch_size=16
  critic.ppo_micro_batch_size_per_gpu=64
  critic.torchtitan.dtype=float32
  critic.torchtitan.use_torch_compile=False
  critic.torchtitan.attn_type=varlen
  # the rollout
  actor_rollout_ref.rollout.name=torchtitan
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
  actor_rollout_ref.rollout.free_cache_engine=False
  actor_rollout_ref.rollout.calculate_log_probs=True
  # the run
  trainer.total_epochs=1 trainer.total_training_steps=20
  trainer.logger=[console] trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
  trainer.default_local_dir="$folder/checkpoints/grpo" trainer.resume_mode=disable
)
exec "$PYTHON" -m verl.trainer.main_ppo "${settings[@]}" "$@"
