"""Make the CPU a device that verl can train on."""

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
from verl.plugin.platform import PlatformBase


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing: a CPU needs no such call."""


def _no_bytes(device: Any = None) -> int:
    return 0


class _CPUModule:
    """Stands for `torch.<device>` in verl: `torch.cpu`, and the functions that it lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False  # verl then skips emptying caches and reading random states

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the host's free and total bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    memory_allocated = memory_reserved = staticmethod(_no_bytes)
    max_memory_allocated = max_memory_reserved = staticmethod(_no_bytes)
    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(_nothing)
    set_per_process_memory_fraction = staticmethod(_nothing)


class CPUPlatform(PlatformBase):
    """A machine without an accelerator.

    verl takes the first registered platform that is available, and this platform comes last. A host
    without an accelerator that drives machines with GPUs needs the environment variable
    VERL_PLATFORM=nvidia.
    """

    device_name = vendor_name = "cpu"
    device_module = _CPUModule()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # an argument of `Tensor.to`, where a number would mean an accelerator

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for the logical "GPU" below

    def ray_resource_name(self) -> str:
        """The only resource that verl counts; `ray.init(num_gpus=...)` sets a node's number."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    set_device = synchronize = empty_cache = set_allocator_settings = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)


def mend_process_groups() -> None:
    """Replace two functions of verl, so that it can make process groups on CPUs.

    verl 0.9.1 passes "cpu:gloo,<device>:<backend>" to torch, which refuses "cpu" twice. Call this
    before `verl.workers.engine_workers` is imported, because it copies one of the functions.
    """
    # These modules ask for a platform when imported, so `CPUPlatform` must be registered first.
    from verl.utils import device, distributed

    of_spmd = distributed.initialize_global_process_group
    of_ray = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(
        timeout_second: float | None = None, backend: str | None = None
    ) -> None:
        is_cpu = backend is None and device.get_device_name() == "cpu"
        of_ray(timeout_second, "cpu:gloo" if is_cpu else backend)

    def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
        if device.get_device_name() != "cpu":
            return of_spmd(timeout_second)
        torch.distributed.init_process_group(
            "cpu:gloo",
            timeout=timedelta(seconds=timeout_second),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        return int(os.environ["LOCAL_RANK"]), rank, world_size

    distributed.initialize_global_process_group = initialize_global_process_group
    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
