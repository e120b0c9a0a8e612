"""Seeds that ranks agree on, and kernels that give the same result in every run."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torchtitan.config.job_config import Debug
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools import host, torch_parts
from torchtitan.tools.compiler import compiled_on_first_call, load_flex_attention
from torchtitan.tools.logging import logger


def set_determinism(
    parallel_dims: ParallelDims,
    device: torch.device,
    debug_config: Debug,
    distinct_seed_mesh_dims: list[str],
) -> int:
    """Seed the random generators; returns the base seed, the same on every rank.

    The base seed is `debug.seed`, or else the seed of rank 0's generator. A single rank without
    `debug.seed` keeps its generators as they are. Ranks with different indices along
    `distinct_seed_mesh_dims` draw different numbers.
    """
    if debug_config.deterministic:
        use_deterministic_kernels(debug_config.deterministic_warn_only)
    seed = base_seed = agree_on_seed(parallel_dims, device, debug_config)
    has_peers = parallel_dims.world_size > 1
    if has_peers:
        # Add this rank's index along the given mesh axes, where the first axis varies fastest.
        stride = 1
        for name in distinct_seed_mesh_dims:
            mesh = parallel_dims.get_optional_mesh(name)
            if mesh is not None:
                seed += mesh.get_local_rank() * stride
                stride *= mesh.size()
        seed %= 2**64
        logger.info("seed %d on global rank %d", seed, c10d.get_rank())
    elif debug_config.seed is None:
        return base_seed
    torch.manual_seed(seed)
    # For child processes only: this interpreter fixed its string hashes when it started.
    host.change_environment("PYTHONHASHSEED", str(seed % 2**32))
    # DTensor has its own generator, except on the CPU. Seeding it replaces DTensor's RNG tracker;
    # `host` restores the old tracker later.
    if has_peers and parallel_dims.world_size > parallel_dims.pp:
        world_mesh = parallel_dims.world_mesh
        if world_mesh.device_type != "cpu":
            module, tracker = torch_parts.place("rng_tracker")
            before = getattr(module, tracker)
            torch_parts.seed_dtensors(seed, world_mesh)
            host.change(
                getattr(module, tracker),
                lambda value: setattr(module, tracker, value),
                before=before,
            )
    return base_seed


def agree_on_seed(parallel_dims: ParallelDims, device: torch.device, debug_config: Debug) -> int:
    """Return the base seed of `set_determinism` without seeding anything."""
    if debug_config.seed is not None:
        return debug_config.seed
    # The state of the CPU generator begins with its seed.
    seed_bytes = torch.get_rng_state()[:8]
    if parallel_dims.world_size > 1:
        seed_bytes = seed_bytes.to(device)
        dist.broadcast(seed_bytes, src=0)
    return seed_bytes.cpu().view(torch.uint64).item()


def use_deterministic_kernels(warn_only: bool) -> None:
    """Restrict torch to deterministic kernels, until the last engine is closed."""
    host.change(
        (True, warn_only),
        read=lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        write=lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    )
    host.change_attribute(torch.backends.cudnn, "deterministic", True)
    host.change_attribute(torch.backends.cudnn, "benchmark", False)
    host.change_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Compile flex attention again without autotuning, which may choose another kernel in each run.
    attention = sys.modules.get("torchtitan.models.attention")
    if attention is not None:
        host.change_attribute(
            attention.FlexAttentionWrapper,
            "_compiled_flex_attn",
            compiled_on_first_call(load_flex_attention, "flex_attention"),
        )
