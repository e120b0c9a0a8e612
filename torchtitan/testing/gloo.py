"""Run a function on several ranks of this machine, on CPUs with gloo or on GPUs, and return every
rank's result.

The ranks are forked from a server process that has imported torch and this package. The first call
starts the server, which takes a few seconds of that call's timeout.
"""

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torchtitan.tools.host import signal_at_parents_death

# Modules that the fork server imports at the first call. Add modules before the first call.
PRELOADED_MODULES = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torchtitan.config.manager",
    "torchtitan.callbacks.metrics",
    "torchtitan.models.llama3",
    "torchtitan.trainer",
]
_SECONDS_FOR_OTHER_FAILURES = 1.0
_STACK_FILE = "{folder}/rank_{rank}.stack"

Ranks = list[tuple[BaseProcess, Connection]]
"""The processes, in rank order, and the pipes that they send their results through."""


class RankFailure(RuntimeError):
    """A rank raised or died. The message has the rank's traceback; `__cause__` is its exception, if any."""


class RankTimeout(RuntimeError):
    """A rank did not end in time. The message has the stack of each hung rank."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120,
    init_process_group: bool = True,
    on_accelerators: bool = False,
) -> list[Any]:
    """Return the results of `fn(*args)` from `world_size` new processes, in rank order.

    `fn`, `args` and the results must be picklable, so `fn` is defined at the top of a module.
    Each rank has one torch thread, no accelerator, a copy of this process's environment, and
    torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).

    init_process_group: give each rank a gloo process group, and destroy it afterwards. If False,
        `fn` creates its own group, and must not return before all ranks are connected.
    on_accelerators: give each rank an accelerator, and a group with the device's backend and gloo.

    Raises RankFailure if a rank raises or dies, RankTimeout if a rank hangs. Kills all ranks first.
    """
    call = pickle.dumps((fn, args))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        free_port = probe.getsockname()[1]
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port),
    }
    # A forked process cannot use CUDA if the server has initialised CUDA.
    can_fork = "forkserver" in multiprocessing.get_all_start_methods() and not on_accelerators
    context = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    if can_fork:
        context.set_forkserver_preload(PRELOADED_MODULES)
    if not on_accelerators:
        # Hide the accelerators of this machine, if it has any.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

    ranks: Ranks = []
    with tempfile.TemporaryDirectory(prefix="gloo_ranks_") as folder:
        group_timeout = timedelta(seconds=timeout_seconds) if init_process_group else None
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                its_environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, call, its_environment, group_timeout, folder, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect(ranks, folder, timeout_seconds)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


# ---- on a rank ----


def _rank_main(
    rank: int,
    world_size: int,
    call: bytes,
    environment: dict[str, str],
    group_timeout: timedelta | None,
    folder: str,
    pipe: Connection,
) -> None:
    """Call `fn`; send ("result", value), or ("failure", time, traceback, exception or None), to `pipe`."""
    signal_at_parents_death(signal.SIGKILL)
    # With the start method "forkserver", a rank's data workers would outlive a killed rank.
    multiprocessing.set_start_method(None, force=True)
    # A garbage collection would write to, and so copy, all memory that is shared with the server.
    gc.freeze()
    # With the default of 700, garbage collection takes a tenth of a short run.
    gc.set_threshold(50_000)
    os.environ.clear()
    os.environ.update(environment)
    stack_file = open(_STACK_FILE.format(folder=folder, rank=rank), "w")
    faulthandler.register(signal.SIGQUIT, file=stack_file)
    # Imported only now, so that torch reads the environment above.
    import torch

    from torchtitan.tools.utils import get_device_info

    dist = torch.distributed
    try:
        torch.set_num_threads(1)
        if group_timeout is not None:
            backend = "gloo"
            device_type, device_module = get_device_info()
            if device_type != "cpu":
                device_module.set_device(rank)
                backend = dist.Backend.default_device_backend_map[device_type]
                backend = f"{device_type}:{backend},cpu:gloo"
            dist.init_process_group(
                backend,
                store=dist.FileStore(os.path.join(folder, "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=group_timeout,
            )
        fn, args = pickle.loads(call)
        result = fn(*args)
        if group_timeout is not None and dist.is_initialized():
            # A rank that exits early would close its connections to ranks that still run `fn`.
            dist.barrier()
        message = pickle.dumps(("result", result))
    except BaseException as error:
        failure = ("failure", time.monotonic(), "".join(traceback.format_exception(error)))
        try:
            message = pickle.dumps((*failure, error))
            pickle.loads(message)  # some exceptions pickle but cannot be rebuilt
        except Exception:
            message = pickle.dumps((*failure, None))
    pipe.send_bytes(message)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- in the caller ----


def _collect(ranks: Ranks, folder: str, timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, BaseException | None]] = []
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                kind, *payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process, _ = ranks[rank]
                process.join(timeout=5)
                text = f"the process ended without a word, exit code {process.exitcode}"
                # A failure of another rank doesn't kill a process, so this is the first failure.
                kind, payload = "failure", [-math.inf, text, None]
            if kind == "result":
                results[rank] = payload[0]
                continue
            failed_at, text, error = payload
            failures.append((failed_at, rank, text, error))
            # The other ranks may now hang, waiting for the failed rank, so don't wait long for them.
            deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHER_FAILURES)
    if failures:
        # Later failures follow from the first: the failed rank closed its connections.
        failures.sort(key=lambda failure: failure[0])
        _, rank, text, error = failures[0]
        also = f" (then also {[r for _, r, *_ in failures[1:]]})" if failures[1:] else ""
        raise RankFailure(f"rank {rank} failed first{also}:\n{text}") from error
    if waiting:
        hung = sorted(waiting.values())
        for rank in hung:
            os.kill(ranks[rank][0].pid, signal.SIGQUIT)  # the rank writes its stack to a file
        time.sleep(0.3)
        lines = [f"ranks {hung} of {len(ranks)} did not end in time and were killed."]
        for rank in hung:
            path = Path(_STACK_FILE.format(folder=folder, rank=rank))
            stack = path.read_text() if path.exists() else "not started yet"
            lines.append(f"rank {rank}:\n{stack}")
        raise RankTimeout("\n".join(lines))
    return [results[rank] for rank in range(len(ranks))]
