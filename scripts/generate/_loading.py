"""A model to generate with, from a config and the weights in a folder."""

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchtitan.checkpoint.conversion import load_weights
from torchtitan.checkpoint.folder import Contents, contents_of, list_steps
from torchtitan.checkpoint.hf import load_from_hf
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks import check_flavor
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype


@torch.no_grad()
def load_model(
    job_config: JobConfig, train_spec: TrainSpec, path: str, device: torch.device
) -> nn.Module:
    """Return the config's model on `device`, in training.dtype, with the weights under `path`."""
    check_flavor(job_config, train_spec)
    path = find_checkpoint(path)
    model_args = copy.deepcopy(train_spec.model_args[job_config.model.flavor])
    model_args.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        model = train_spec.model_cls(model_args)
    model.to_empty(device=device)
    # For what no checkpoint holds, like the RoPE table; the weights are read over.
    model.init_weights()

    weights = get_model_state_dict(model)
    description = f"{job_config.model.name} {job_config.model.flavor}"
    if contents_of(path) == Contents.HF:
        if train_spec.state_dict_adapter is None:
            raise ValueError(f"{job_config.model.name} has no adapter for Hugging Face weights")
        adapter = train_spec.state_dict_adapter(model_args, None)
        load_from_hf(weights, adapter, path, False, description)
    else:
        load_weights(weights, path, description)
    return model.eval()


def find_checkpoint(path: str) -> str:
    """Return `path`, or the newest finished step folder in it; ValueError if there is none."""
    if contents_of(path) != Contents.UNKNOWN:
        return path
    steps = [step for step in list_steps(path) if step.is_finished]
    if not steps:
        raise ValueError(
            f"--checkpoint must be a step folder of a run, a folder of such, or a folder with "
            f"Hugging Face safetensors files, and {path!r} is none; train with "
            "--checkpoint.enable to get <job.dump_folder>/checkpoint"
        )
    logger.info(f"taking the newest checkpoint, {steps[-1].path}")
    return steps[-1].path
