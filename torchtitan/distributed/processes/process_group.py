"""The default process group: joining it or reusing the host's, timeouts, simulated ranks."""

import contextlib
import logging
import os
import re
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config.job_config import Comm
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.processes.own_groups import (
    claim_default_group,
    forget_meshes,
    group_is_ours,
    making_groups,
)
from torchtitan.tools import host, torch_parts
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import get_device_info, run_beside


def init_distributed(
    comm_config: Comm,
    enable_cpu_backend: bool = False,
    base_folder: str = "",
    ranks: list[int] | None = None,
) -> int:
    """Join the default process group, or reuse the host's; returns the world size.

    A group that this function makes is destroyed with the last engine of this process. Outside
    torchrun (no RANK, no WORLD_SIZE) this process becomes the only rank of a group.
    `enable_cpu_backend` adds gloo for CPU tensors. NCCL writes its traces of a hang below `base_folder`.
    Raises ValueError if an existing group cannot communicate on this machine's device.
    """
    if comm_config.mode != "default" and not dist.is_initialized():
        world_size = ranks_in_environment(comm_config)
        init_fake_mode(world_size, comm_config.mode)
        _destroy_group_at_end()
        return world_size
    if dist.is_initialized():
        # Without an engine, nothing would restore the environment variables that this call changes.
        if host.engines():
            _configure_flight_recorder(comm_config, base_folder, dist.get_backend_config())
        _check_existing_group(enable_cpu_backend)
        if not group_is_ours():
            warn_once(
                logger,
                "the existing process group is reused: comm.mode, comm.init_timeout_seconds, "
                "comm.train_timeout_seconds and torchtitan's choice of backend and ranks have no "
                "effect on this group. The flight recorder (comm.trace_buf_size, "
                "comm.save_traces_folder, comm.save_traces_file_prefix) records only groups that "
                "engines make from now on",
            )
        return dist.get_world_size()
    backend = _default_backend(enable_cpu_backend)
    _configure_flight_recorder(comm_config, base_folder, backend)
    timeout = timedelta(seconds=comm_config.init_timeout_seconds)
    meeting = _rendezvous(timeout)
    # Given the device, NCCL connects all ranks now, so that a broken link fails here.
    device_type, _ = get_device_info()
    local_rank = os.environ.get("LOCAL_RANK")
    excepthook = sys.excepthook
    connects = device_type != "cpu" and meeting["world_size"] > 1 and local_rank is not None
    with making_groups():
        dist.init_process_group(
            backend=backend,
            timeout=timeout,
            device_id=torch.device(device_type, int(local_rank)) if connects else None,
            _ranks=ranks or [],
            **meeting,
        )
    # While the default group is bound to a device, torch (2.13) creates every later NCCL group by a split
    # of the default group, which all its ranks have to join. A group for some ranks only would hang.
    dist.group.WORLD.bound_device_id = None
    # Torch's hook prefixes a traceback's lines with the rank. `host` restores the old hook at the end.
    ranks_hook, sys.excepthook = sys.excepthook, excepthook
    host.change_attribute(sys, "excepthook", ranks_hook)
    _destroy_group_at_end()
    return dist.get_world_size()


def ranks_in_environment(comm_config: Comm) -> int:
    """Return the number of ranks in the environment: WORLD_SIZE, or NGPU if ranks are simulated."""
    name, unset = ("WORLD_SIZE", "1") if comm_config.mode == "default" else ("NGPU", "")
    value = os.environ.get(name, unset)
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"the environment variable {name} must be the number of ranks, a positive integer, with "
            f"comm.mode = {comm_config.mode!r}, got {value!r}; set it"
        )
    return int(value)


def _destroy_group_at_end() -> None:
    def destroy() -> None:
        if group_is_ours():
            dist.destroy_process_group()
            forget_meshes()

    claim_default_group()
    host.at_last_move_out(destroy)


# ---- where ranks meet ----

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# The variables' values -> [(store, rank, world size), number of groups made with this store]. All groups of
# this process use one store: with a new store per group, ranks that make the next group while
# another rank still leaves the last group would find old keys, or a server that is closing.
_meeting_places: dict[tuple[str, ...], list[Any]] = {}


def _rendezvous(timeout: timedelta) -> dict[str, Any]:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    store, rank, world_size = find_peers(timeout)
    place = _meeting_places[_meeting_place()]
    place[1] += 1
    store = dist.PrefixStore(f"torchtitan_{place[1]}", store)
    return {"store": store, "rank": rank, "world_size": world_size}


def find_peers(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return (the store that all ranks share, rank, world size) from torchrun's environment variables.

    Raises ValueError if some of these variables are missing, RunError if not all ranks connect to
    MASTER_ADDR, MASTER_PORT in time.
    """
    place = _meeting_place()
    if place not in _meeting_places:
        _meeting_places[place] = [_meet(place, timeout), 0]
    store, rank, world_size = _meeting_places[place][0]
    store.set_timeout(timeout)
    # torchrun's own store survives a restart and still has the addresses of ended processes: prefix keys
    # with the attempt. Other stores are new in each attempt, and nodes may disagree on the attempt's number.
    has_old_keys = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_old_keys else "0"
    return dist.PrefixStore(f"attempt_{attempt}_of_{world_size}", store), rank, world_size


def _meet(place: tuple[str, ...], timeout: timedelta) -> tuple[dist.Store, int, int]:
    rank, world_size, address, port = place
    seconds, something_answers = timeout.total_seconds(), False
    deadline = time.monotonic() + seconds
    try:
        # Wait here until rank 0, or torchrun, is reachable: torch's own wait logs many warnings.
        while rank != "0":
            try:
                socket.create_connection((address, int(port)), timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        something_answers = True
        # torch waits for ever if another program has the port. Otherwise torch's own error comes
        # before this time limit, and says how many ranks joined.
        meeting = run_beside(lambda: next(dist.rendezvous("env://", timeout=timeout)))
        return meeting.result(seconds + 2)
    except (dist.DistError, OSError) as error:
        where = f"MASTER_ADDR = {address}, MASTER_PORT = {port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise RunError(
                f"rank {rank} cannot listen for the other ranks at {where}: the port is in use, perhaps "
                "by a job that has not ended; end it, or set another MASTER_PORT on all ranks"
            ) from error
        joined = re.search(r"(\d+)/\d+ clients joined", str(error))
        seen = f"nothing answers there ({error})"
        if something_answers and isinstance(error, TimeoutError):
            seen = "a program listens there, but does not answer as rank 0 of a job does"
        elif joined:
            seen = f"{joined[1]} of {world_size} ranks came"
        raise RunError(
            f"rank {rank} did not meet the other ranks within {seconds:.0f} s "
            f"(comm.init_timeout_seconds) at {where}: {seen}; check the address, that a firewall lets "
            f"it through, and that all {world_size} ranks were started, with the same WORLD_SIZE"
        ) from error


def join_part(name: str, rank: int, world_size: int) -> None:
    """Permanently make this process a rank of the job's part `name`, with the part's RANK, WORLD_SIZE and
    default process group. Call `find_peers` first."""
    store = _meeting_places[_meeting_place()][0][0]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    place = dist.PrefixStore(name, store), rank, world_size
    _meeting_places[_meeting_place()] = [place, 0]


def _meeting_place() -> tuple[str, ...]:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment has RANK or WORLD_SIZE, but not {', '.join(missing)}; start with "
            f"torchrun, set all of {', '.join(_TORCHRUN_VARIABLES)}, or unset RANK and WORLD_SIZE "
            f"to run as one process"
        )
    return tuple(os.environ[name] for name in _TORCHRUN_VARIABLES)


# ---- backends ----


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
        # Gloo accepts CUDA tensors, but has neither all-gather nor reduce-scatter for them.
        if backend is None or (backend == "gloo" and needed != "cpu"):
            raise ValueError(
                f"this job needs to communicate {needed} tensors, which the existing process group "
                f"({config}) cannot; create it with backend "
                f"{_default_backend(enable_cpu_backend)!r}, or let torchtitan create it"
            )


def _configure_flight_recorder(comm_config: Comm, base_folder: str, backend: str) -> None:
    """Make NCCL write its last collectives to a file at a timeout; keep gloo's record small."""
    # 3: a failed collective ends the process without waiting until the other ranks notice. The value
    # 1 is torchrun's default, not a user's choice.
    _set_environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", launcher_default="1")
    is_written = "nccl" in backend
    size = comm_config.trace_buf_size if is_written else min(comm_config.trace_buf_size, 100)
    _set_environment("TORCH_FR_BUFFER_SIZE", str(size))
    if size > 0 and is_written:
        folder = os.path.join(base_folder, comm_config.save_traces_folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:  # in a host's process there may be no writable folder
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


# ---- simulated ranks, timeouts ----


def init_fake_mode(world_size: int, comm_mode: str = "fake_backend") -> None:
    """Act as rank 0 of `world_size` ranks that don't exist; collectives return at once.

    comm_mode "local_tensor": this process computes with every rank's tensors instead.
    """
    dist.init_process_group("fake", rank=0, world_size=world_size)
    if comm_mode == "local_tensor":
        # Never exited: simulated ranks stay for the rest of the process.
        torch_parts.LocalTensorMode(world_size).__enter__()


def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
    """Set the timeout of every group in use, except the host's. Collective, so that no rank is still in
    its first step, which compiles and connects, when the shorter timeout begins."""
    level = logging.INFO if dist.get_world_size() > 1 else logging.DEBUG
    logger.log(level, "from now on, collectives time out after %s", timeout)
    device_type, device_module = get_device_info()
    if device_type == "cpu":
        # Gloo takes no device_ids.
        dist.barrier()
    else:
        dist.barrier(device_ids=[device_module.current_device()])
        device_module.synchronize()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    groups = [mesh.get_group() for mesh in meshes]
    groups += [dist.group.WORLD] if group_is_ours() else []
    for group in groups:
        # Some backends, such as "fake", have no timeouts.
        with contextlib.suppress(RuntimeError):
            group.set_timeout(timeout)
