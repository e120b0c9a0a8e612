"""What `init_distributed` does if the program that embeds the trainer has made the process group."""

import dataclasses

import torch.distributed as dist

from torchtitan.config.job_config import Comm
from torchtitan.tools import utils
from torchtitan.tools.logging import logger


def use_existing_group(comm_config: Comm, enable_cpu_backend: bool) -> int:
    """Return the number of ranks of the default process group, which is used as it is.

    Warns, and names the settings of [comm] that differ from their defaults, because none of them has
    an effect. Changes no environment variable and no time-out.
    Raises ValueError if the group has no backend for the device, or none for the CPU with offload.
    """
    config = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    served = {part.partition(":")[0] for part in str(config).split(",")}
    needed = {utils.device_type} | ({"cpu"} if enable_cpu_backend else set())
    if missing := sorted(needed - served):
        raise ValueError(
            f"the process group that exists has backends {config}, and none for {', '.join(missing)}; "
            f"call init_process_group with a backend for {', '.join(sorted(needed))}, or let the "
            "trainer make the group"
        )
    defaults = Comm()
    ignored = [
        f"comm.{field.name} = {getattr(comm_config, field.name)!r}"
        for field in dataclasses.fields(defaults)
        if getattr(comm_config, field.name) != getattr(defaults, field.name)
    ]
    size = dist.get_world_size()
    logger.warning(
        "a process group of %d rank(s), %s, exists and is used as it is; %s",
        size,
        config,
        f"without effect: {', '.join(ignored)}" if ignored else "all of [comm] has its defaults",
    )
    return size
