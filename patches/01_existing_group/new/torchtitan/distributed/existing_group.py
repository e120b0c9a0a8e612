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
    backends = str(dist.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    needed = {utils.device_type} | ({"cpu"} if enable_cpu_backend else set())
    if missing := needed - {part.partition(":")[0] for part in backends.split(",")}:
        raise ValueError(
            f"the process group that exists has backends {backends}, and none for "
            f"{' and '.join(sorted(missing))}; call init_process_group with a backend for each of "
            f"{', '.join(sorted(needed))}, or let the trainer make the group"
        )
    given, defaults = dataclasses.asdict(comm_config), dataclasses.asdict(Comm())
    ignored = [f"comm.{key} = {x!r}" for key, x in given.items() if x != defaults.get(key, x)]
    logger.warning(
        f"a process group of {dist.get_world_size()} rank(s), {backends}, exists and is used as it is; "
        f"without effect: {', '.join(ignored) or 'nothing, because [comm] has its defaults'}"
    )
    return dist.get_world_size()
