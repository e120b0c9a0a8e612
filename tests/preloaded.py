"""Loaded by the server that the ranks and jobs of all tests are forked from: what many of them need.

Not `torchtitan.train`, which a job runs as `python -m` does.
"""

# ruff: noqa: F401
import pytest  # a rank imports the test file that its function is in
import tokenizers
import torch.distributed.pipelining
import torch.distributed.tensor.parallel.ddp
import torch.utils.flop_counter
import torch.utils.tensorboard

import torchtitan.distributed.activation_checkpoint
import torchtitan.distributed.device_reads
import torchtitan.distributed.expert_parallel
import torchtitan.distributed.pipeline_schedule
import torchtitan.distributed.processes.peers
import torchtitan.experiments.rl_toy.tasks
import torchtitan.models.deepseek_v3
import torchtitan.models.gpt_oss
import torchtitan.models.llama4
import torchtitan.models.qwen3
import torchtitan.models.tp_plan
import torchtitan.rl.controller
import torchtitan.rl.trainer
from torchtitan.config import ConfigManager

ConfigManager().parse_args([])  # a process's first command line takes twice as long as its second
