"""Process groups, seeds, reductions over meshes, gradient clipping."""

import contextlib
import functools
import math
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import Comm, Debug
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools import host
from torchtitan.tools.errors import RunError
from torchtitan.tools.linear import cpu_multiplies_bf16
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import get_device_info

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---- the process group ----


def init_distributed(
    comm_config: Comm,
    enable_cpu_backend: bool = False,
    base_folder: str = "",
    ranks: list[int] | None = None,
) -> int:
    """Join the default process group, or reuse the one that exists; returns the world size.

    A group that an engine makes here is destroyed when the last engine of this process is closed.

    Outside torchrun (no RANK, no WORLD_SIZE) this process becomes a group of one, and needs no
    environment. `enable_cpu_backend` adds gloo for CPU tensors on a machine with accelerators.
    NCCL's traces of a hang go below `base_folder`.

    Raises ValueError if torchrun's variables are there only in part, and if an existing group
    cannot communicate on this machine's device; RunError if not all ranks come.
    """
    if comm_config.mode != "default" and not dist.is_initialized():
        world_size = _simulated_world_size(comm_config.mode)
        init_fake_mode(world_size, comm_config.mode)
        _destroy_group_at_end()
        return world_size
    backend = (
        dist.get_backend_config() if dist.is_initialized() else _default_backend(enable_cpu_backend)
    )
    _configure_flight_recorder(comm_config, base_folder, backend)
    if dist.is_initialized():
        _check_existing_group(enable_cpu_backend)
        if not group_is_ours():
            warn_once(
                logger,
                "the process group exists already and is reused: our settings for it (backend, "
                "comm.init_timeout_seconds, ranks) don't take effect",
            )
        return dist.get_world_size()
    timeout = timedelta(seconds=comm_config.init_timeout_seconds)
    meeting = _rendezvous(timeout)
    dist.init_process_group(
        backend=backend,
        timeout=timeout,
        device_id=_device_to_connect(meeting["world_size"]),
        _ranks=ranks or [],
        **meeting,
    )
    # Left bound to the device, the group would have every later one split from it, by all ranks
    # together: a hang where a client's group has ranks of its own and a server's, and one split
    # per rank for each mesh axis of size 1.
    dist.group.WORLD.bound_device_id = None
    _destroy_group_at_end()
    return dist.get_world_size()


def _device_to_connect(world_size: int) -> torch.device | None:
    """This rank's device, for NCCL to connect all ranks now: a broken link or a device that two
    ranks chose shows here, not at the first collective.

    None where there is nobody to connect with, and where only the host knows the device.
    """
    device_type, _ = get_device_info()
    local_rank = os.environ.get("LOCAL_RANK")
    if device_type == "cpu" or world_size == 1 or local_rank is None:
        return None
    return torch.device(device_type, int(local_rank))


_our_group: "weakref.ref[dist.ProcessGroup] | None" = None


def group_is_ours() -> bool:
    """Whether the default process group was made by `init_distributed`, not by the host."""
    return _our_group is not None and _our_group() is dist.group.WORLD is not None


def _destroy_group_at_end() -> None:
    global _our_group
    _our_group = weakref.ref(dist.group.WORLD)
    host.at_last_move_out(_destroy_our_group)


def _destroy_our_group() -> None:
    if not group_is_ours():
        return
    dist.destroy_process_group()
    # DTensor remembers results by meshes that look alike; the next engine's would find this one's
    # groups behind them.
    if "torch.distributed.tensor" not in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError):  # a torch with other caches
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _rendezvous(timeout: timedelta) -> dict[str, Any]:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    store, rank, world_size = find_peers(timeout)
    place = _meeting_places[_meeting_place()]
    place[1] += 1
    group_store = dist.PrefixStore(f"torchtitan_{place[1]}", store)
    return {"store": group_store, "rank": rank, "world_size": world_size}


def find_peers(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that the ranks of torchrun's environment share; this rank; the number of ranks.

    Raises ValueError if a part of that environment is missing, RunError if not all ranks come to
    MASTER_ADDR, MASTER_PORT in time.
    """
    place = _meeting_place()
    if place not in _meeting_places:
        try:
            _wait_for_server(timeout)
            _meeting_places[place] = [next(dist.rendezvous("env://", timeout=timeout)), 0]
        except (dist.DistError, OSError) as error:
            raise _no_meeting(error, timeout) from error
    store, rank, world_size = _meeting_places[place][0]
    store.set_timeout(timeout)
    # torchrun's store outlives a restart, and with it the addresses of processes that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}_of_{world_size}", store), rank, world_size


def _wait_for_server(timeout: timedelta) -> None:
    """Return when rank 0, or torchrun, can be reached: torch would print pages while it waits."""
    rank, _, address, port = _meeting_place()
    deadline = time.monotonic() + timeout.total_seconds()
    while rank != "0":
        try:
            socket.create_connection((address, int(port)), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _meeting_place() -> tuple[str, ...]:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment names a rank or a world size, but not {', '.join(missing)}; start "
            f"with torchrun, set all of {', '.join(_TORCHRUN_VARIABLES)}, or unset RANK and "
            f"WORLD_SIZE to run as one process"
        )
    return tuple(os.environ[name] for name in _TORCHRUN_VARIABLES)


def _no_meeting(error: Exception, timeout: timedelta) -> RunError:
    rank, world_size, address, port = _meeting_place()
    where = f"MASTER_ADDR = {address}, MASTER_PORT = {port}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return RunError(
            f"rank {rank} cannot wait for the others at {where}: the port is in use, perhaps by a "
            "job that has not ended; end it, or set another MASTER_PORT on all ranks"
        )
    came = re.search(r"(\d+)/\d+ clients joined", str(error))
    seen = f"{came[1]} of {world_size} ranks came" if came else f"nothing answers there ({error})"
    return RunError(
        f"rank {rank} did not meet the other ranks within {timeout.total_seconds():.0f} s "
        f"(comm.init_timeout_seconds) at {where}: {seen}; check the address, that a firewall lets "
        f"it through, and that all {world_size} ranks were started, with the same WORLD_SIZE"
    )


# Where ranks meet -> [(store, rank, world size), groups made there]. One store for all groups of
# this process, one after the other: ranks that meet anew while another still leaves the last group
# would find its keys, or a server that is going away.
_meeting_places: dict[tuple[str, ...], list[Any]] = {}


def _default_backend(enable_cpu_backend: bool) -> str:
    device_type, _ = get_device_info()
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    if enable_cpu_backend and device_type != "cpu":
        return f"{device_type}:{backend},cpu:gloo"
    return backend


def _check_existing_group(enable_cpu_backend: bool) -> None:
    config = dist.get_backend_config()
    backend_of = dict(pair.split(":") for pair in config.split(","))
    device_type, _ = get_device_info()
    for needed in {device_type, "cpu"} if enable_cpu_backend else {device_type}:
        backend = backend_of.get(needed)
        # Gloo lists CUDA, but has neither all-gather nor reduce-scatter there.
        if backend is None or (backend == "gloo" and needed != "cpu"):
            raise ValueError(
                f"the process group that exists already ({config}) cannot communicate "
                f"{needed} tensors as this job needs; create it with backend "
                f"{_default_backend(enable_cpu_backend)!r}, or let torchtitan create it"
            )


def _configure_flight_recorder(comm_config: Comm, base_folder: str, backend: str) -> None:
    """Have NCCL record its last collectives and write them down when one times out."""
    # 3: a failed collective ends the process but does not wait for the other ranks to notice.
    # torchrun sets 1 for everybody, so replacing it overrules nobody.
    _set_environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", launcher_default="1")
    _set_environment("TORCH_FR_BUFFER_SIZE", str(comm_config.trace_buf_size))
    if comm_config.trace_buf_size > 0 and "nccl" in backend:
        folder = os.path.join(base_folder, comm_config.save_traces_folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:  # a guest may have no place to write
            warn_once(logger, f"a hang will leave no traces: {error}; set job.dump_folder")
            return
        _set_environment("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        _set_environment(
            "TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, comm_config.save_traces_file_prefix)
        )


def _set_environment(name: str, value: str, launcher_default: str | None = None) -> None:
    old = os.environ.get(name)
    if old not in (None, value, launcher_default):
        logger.warning("environment variable %s changes from %r to %r", name, old, value)
    host.change_environment(name, value)


def _simulated_world_size(mode: str) -> int:
    value = os.environ.get("NGPU", "")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(
            f"comm.mode = {mode!r} simulates as many ranks as the environment variable NGPU "
            f"says; it must be a positive integer, got {value!r}"
        )
    return int(value)


def init_fake_mode(world_size: int, comm_mode: str = "fake_backend") -> None:
    """Act as rank 0 of `world_size` ranks that don't exist; collectives return at once.

    With comm_mode "local_tensor" this process holds every rank's tensors instead, and
    collectives are computed on them.
    """
    dist.init_process_group("fake", rank=0, world_size=world_size)
    if comm_mode == "local_tensor":
        from torch.distributed._local_tensor import LocalTensorMode

        # Stays on for the rest of the process: there is no way back from simulated ranks.
        LocalTensorMode(world_size).__enter__()


def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
    """Give every group in use this timeout from here on. All ranks must call it.

    A default group that the host made keeps its own.

    The first step compiles and connects, so it runs under a longer timeout; a barrier keeps a
    rank that is still in it from being timed by the shorter one.
    """
    logger.info("collectives time out after %s from here on", timeout)
    device_type, device_module = get_device_info()
    if device_type == "cpu":
        dist.barrier()  # gloo takes no device_ids
    else:
        dist.barrier(device_ids=[device_module.current_device()])
        device_module.synchronize()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    groups = [mesh.get_group() for mesh in meshes] + [c10d._get_default_group()]
    for group in groups:
        if group is dist.group.WORLD and not group_is_ours():
            continue
        if dist.get_backend(group) != "fake":
            c10d._set_pg_timeout(timeout, group)


# ---- seeds ----


def set_determinism(
    parallel_dims: ParallelDims,
    device: torch.device,
    debug_config: Debug,
    distinct_seed_mesh_dims: list[str],
) -> int:
    """Seed the random generators; returns the base seed, the same on every rank.

    The base seed is `debug.seed`, or else what rank 0's generator was seeded with. Ranks that
    differ along `distinct_seed_mesh_dims` draw different numbers from torch's generator, all
    others the same. `debug.deterministic` restricts torch to deterministic kernels.
    """
    if debug_config.deterministic:
        use_deterministic_kernels(debug_config.deterministic_warn_only)
    if parallel_dims.world_size == 1:
        if debug_config.seed is None:
            return _generator_seed().item()
        _seed_this_rank(debug_config.seed)
        return debug_config.seed

    base_seed = agree_on_seed(parallel_dims, device, debug_config)
    seed = (base_seed + _seed_offset(parallel_dims, distinct_seed_mesh_dims)) % 2**64
    logger.info("seed %d on global rank %d", seed, c10d.get_rank())
    _seed_this_rank(seed)
    # DTensor draws from a tracker of its own, where the device has one (CPU does not). Pipeline
    # ranks alone make no DTensors.
    if parallel_dims.world_size > parallel_dims.pp:
        world_mesh = parallel_dims.world_mesh
        if world_mesh.device_type != "cpu":
            from torch.distributed.tensor import _random

            before = _random._rng_tracker
            _random.manual_seed(seed, world_mesh)
            host.change(
                _random._rng_tracker,
                write=lambda tracker: setattr(_random, "_rng_tracker", tracker),
                before=before,
            )
    return base_seed


def agree_on_seed(parallel_dims: ParallelDims, device: torch.device, debug_config: Debug) -> int:
    """Return the base seed of `set_determinism`, and seed nothing."""
    if debug_config.seed is not None:
        return debug_config.seed
    if parallel_dims.world_size == 1:
        return _generator_seed().item()
    return _broadcast_seed(device)


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
    # cuBLAS picks its workspace by stream unless told; see torch's reproducibility notes.
    host.change_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Autotuning may choose another kernel in each run. A process that has not loaded the
    # attention module has compiled no kernel with it.
    attention = sys.modules.get("torchtitan.models.attention")
    if attention is not None:
        host.change_attribute(
            attention.FlexAttentionWrapper,
            "_compiled_flex_attn",
            _flex_attention_without_autotuning,
        )


def _flex_attention_without_autotuning(*args: Any, **kwargs: Any) -> Any:
    return _compile_flex_attention()(*args, **kwargs)


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # loads inductor

    return torch.compile(flex_attention)


def _generator_seed() -> Tensor:
    """The seed of torch's CPU generator: the state opens with it, as 8 bytes. uint64 [1]."""
    return torch.get_rng_state()[:8].view(torch.uint64)


def _broadcast_seed(device: torch.device) -> int:
    seed_bytes = _generator_seed().view(torch.uint8).to(device)
    dist.broadcast(seed_bytes, src=0)
    return seed_bytes.cpu().view(torch.uint64).item()


def _seed_offset(parallel_dims: ParallelDims, distinct_seed_mesh_dims: list[str]) -> int:
    """This rank's number along the given mesh axes, the first one varying fastest."""
    offset, stride = 0, 1
    for name in distinct_seed_mesh_dims:
        mesh = parallel_dims.get_optional_mesh(name)
        if mesh is not None:
            offset += mesh.get_local_rank() * stride
            stride *= mesh.size()
    return offset


def _seed_this_rank(seed: int) -> None:
    torch.manual_seed(seed)
    # For child processes: this interpreter's hashes were fixed when it started.
    host.change_environment("PYTHONHASHSEED", str(seed % 2**32))


# ---- contexts a step runs in ----


class TrainContext(Protocol):
    """Called without arguments; returns a context manager to run forward and backward in."""

    def __call__(self) -> contextlib.AbstractContextManager[None]: ...


def get_train_context(enable_loss_parallel: bool) -> TrainContext:
    """A context factory; with loss parallel, cross entropy works on vocabulary-sharded logits."""
    if not enable_loss_parallel:
        return contextlib.nullcontext
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel


def maybe_enable_amp(
    parallel_dims: ParallelDims, mixed_precision_param: str, device_type: str
) -> contextlib.AbstractContextManager[None]:
    """One context manager, to be entered anew around every forward.

    Autocast to `mixed_precision_param` without FSDP; nothing under FSDP, which casts parameters
    itself. Tensor and pipeline parallelism without FSDP run in full precision.
    """
    dtype = TORCH_DTYPE_MAP[mixed_precision_param]
    if dtype == torch.bfloat16 and device_type == "cpu" and not cpu_multiplies_bf16():
        warn_once(
            logger,
            "training.mixed_precision_param = 'bfloat16' on a CPU without bf16 matmul "
            "instructions: correct, but slower than float32, in which it multiplies; set "
            'training.mixed_precision_param = "float32" for speed',
        )
    if parallel_dims.uses_fsdp or dtype == torch.float32:
        return contextlib.nullcontext()
    if parallel_dims.tp_enabled or parallel_dims.pp_enabled:
        logger.warning(
            "training.mixed_precision_param = %r has no effect under tensor or pipeline "
            "parallelism without FSDP: running in training.dtype; add "
            "parallelism.data_parallel_shard_degree > 1 to use it",
            mixed_precision_param,
        )
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str,
) -> Generator[None, None, None]:
    """Torch's own context-parallel context: shards `cp_buffers` on `cp_seq_dims` while inside.

    Raises ValueError on a torch without it.
    """
    try:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
    except ImportError as error:
        raise ValueError(
            f"this torch ({torch.__version__}) has no context_parallel; install torch >= 2.11"
        ) from error
    set_rotate_method(cp_rotate_method)
    return context_parallel(
        cp_mesh,
        buffers=cp_buffers,
        buffer_seq_dims=cp_seq_dims,
        no_restore_buffers=cp_no_restore_buffers,
    )


# ---- one number from all ranks ----


def dist_max(
    x: Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """Largest `x` (one element) over the ranks of `mesh`; an int where `x` is integer."""
    return _dist_reduce(x, "max", mesh, extra_pg)


def dist_sum(
    x: Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """Sum of `x` (one element) over the ranks of `mesh`; an int where `x` is integer."""
    return _dist_reduce(x, "sum", mesh, extra_pg)


def dist_mean(
    x: Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """Mean of `x` (one element) over the ranks of `mesh`."""
    return _dist_reduce(x, "avg", mesh, extra_pg)


def _dist_reduce(
    x: Tensor, op: str, mesh: DeviceMesh | None, extra_pg: dist.ProcessGroup | None
) -> float:
    if is_dtensor(x):
        x = x.full_tensor()
    if extra_pg is not None:
        x = funcol.all_reduce(x, reduceOp=op, group=extra_pg)
    if mesh is None:
        return x.item()
    assert x.numel() == 1, f"expected one element, got shape {tuple(x.shape)}"
    return funcol.all_reduce(x, reduceOp=op, group=mesh).item()


# ---- gradient clipping ----


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
    ep_enabled: bool = False,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

    The norm is that of the whole model: sharded gradients count in full, and with `pp_mesh`
    those of all pipeline stages (then all ranks of it must call). Parameters may lie on
    different meshes, and be plain tensors too unless `ep_enabled`.

    Returns a plain scalar tensor. Raises RuntimeError if the norm is not finite and
    `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if ep_enabled:
        return _clip_grad_norm_with_ep(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh
        )
    # A foreach kernel takes the tensors of one mesh.
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if is_dtensor(parameter.grad) else None
            by_mesh.setdefault(mesh, []).append(parameter)

    norms = [_norm_of_grads(group, norm_type, foreach) for group in by_mesh.values()]
    if not norms:  # a rank without trainable parameters still takes part in the reductions
        norms = [torch.zeros((), device=get_device_info()[0])]
    total_norm = _combine(torch.stack(norms), norm_type)
    if pp_mesh is not None:
        total_norm = _reduce_norm(total_norm, norm_type, pp_mesh)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the norm of the gradients is {total_norm.item()}, so they can't be clipped"
        )
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total_norm, foreach)
    return total_norm


def _clip_grad_norm_with_ep(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    pp_mesh: DeviceMesh | None,
) -> Tensor:
    """`clip_grad_norm_` for experts on meshes of their own, where a plain tensor is a mistake:
    nothing would say which ranks hold it."""
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            assert is_dtensor(parameter) and is_dtensor(parameter.grad), (
                f"with expert parallelism every parameter is a DTensor, "
                f"got {type(parameter)} of shape {tuple(parameter.shape)}"
            )
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh)


def _norm_of_grads(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    grads = [_row_norms(parameter.grad, norm_type) for parameter in parameters]
    norm = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.full_tensor() if is_dtensor(norm) else norm


def _row_norms(grad: Tensor, norm_type: float) -> Tensor:
    """Norm of every row on the CPU, the tensor itself elsewhere; either has the same norm.

    The CPU's kernel adds up a whole fp32 tensor in a few fp32 sums: of 6 million elements the
    norm comes out 2e-4 too small, and otherwise for each way of sharding it. Rows first brings
    that to 5e-7, in a thirtieth of the time.
    """
    if grad.device.type != "cpu" or grad.ndim < 2:
        return grad
    return torch.linalg.vector_norm(grad, norm_type, dim=-1)


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(norms, norm_type) if norms.numel() > 1 else norms[0]


def _reduce_norm(norm: Tensor, norm_type: float, mesh: DeviceMesh) -> Tensor:
    if math.isinf(norm_type):
        return funcol.wait_tensor(funcol.all_reduce(norm, reduceOp="max", group=mesh))
    powers = funcol.wait_tensor(funcol.all_reduce(norm**norm_type, reduceOp="sum", group=mesh))
    return powers ** (1.0 / norm_type)
