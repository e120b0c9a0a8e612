"""Run a function on several ranks of this machine, on CPUs with gloo or on GPUs, and get every
rank's result back.

The ranks are processes of a fork server that has torch loaded, so that a rank starts in
milliseconds instead of paying `import torch` again. The first call starts the server: a few
seconds, which count against its timeout.
"""

import faulthandler
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

_PRELOADED_MODULES = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
]
_SECONDS_FOR_OTHER_FAILURES = 1.0


class RankFailure(RuntimeError):
    """A rank raised or died. The text holds its traceback; `__cause__` the exception, if any."""


class RankTimeout(RuntimeError):
    """A rank did not end in time. The text says where each hung rank stood."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120,
    init_process_group: bool = True,
    progress: Path | None = None,
    on_accelerators: bool = False,
) -> list[Any]:
    """Results of `fn(*args)` from `world_size` new processes, in rank order.

    `fn`, `args` and the results must be picklable, so `fn` lives at the top of a module.
    Each rank has one torch thread, no accelerator, a copy of this process's environment, and
    torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). With
    `init_process_group` it also has a gloo process group, which is destroyed afterwards;
    without, `fn` makes its own. With `progress`, a file that `fn` writes to, the timeout counts
    from the last time that it did. With `on_accelerators` each rank has an accelerator of its
    own, and the process group is NCCL's, or whatever serves that kind, beside gloo for tensors of
    the host; results must be on the host.

    Raises RankFailure when a rank raises or dies, RankTimeout when one hangs. No process
    outlives the call.
    """
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="gloo_ranks_") as folder:
        environment = dict(os.environ) | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(_free_port()),
        }
        if not on_accelerators:
            # These ranks are CPU ranks on a machine with accelerators too.
            environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        context = _process_context(on_accelerators)
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                group = (folder, timeout_seconds) if init_process_group else None
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, call, environment, group, folder, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(processes, pipes, Path(folder), timeout_seconds, progress)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _process_context(on_accelerators: bool) -> multiprocessing.context.BaseContext:
    # CUDA does not survive a fork, should one of the modules have asked for its devices.
    if on_accelerators or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED_MODULES)
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _rank_main(
    rank: int,
    world_size: int,
    call: bytes,
    environment: dict[str, str],
    group: tuple[str, float] | None,
    stack_folder: str,
    pipe: Connection,
) -> None:
    """One rank: sends ("result", value) or ("failure", time, traceback text, exception or None)."""
    signal_at_parents_death(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if hasattr(faulthandler, "register"):
        stack_file = open(_stack_path(Path(stack_folder), rank), "w")
        faulthandler.register(signal.SIGUSR1, file=stack_file)
    try:
        message = pickle.dumps(("result", _run_with_group(rank, world_size, call, group)))
    except BaseException as error:
        message = _failure_message(error)
    pipe.send_bytes(message)
    pipe.close()
    _leave_group()


def _run_with_group(
    rank: int, world_size: int, call: bytes, group: tuple[str, float] | None
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if group is not None:
        folder, timeout_seconds = group
        dist.init_process_group(
            _choose_backend(rank),
            store=dist.FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    fn, args = pickle.loads(call)
    result = fn(*args)
    if group is not None and dist.is_initialized():
        # A rank that leaves early would cut the connections of those still working.
        dist.barrier()
    return result


def _choose_backend(rank: int) -> str:
    """The backends of this rank's device, which becomes the current one, and of the host."""
    import torch.distributed as dist

    from torchtitan.tools.utils import get_device_info

    device_type, device_module = get_device_info()
    if device_type == "cpu":
        return "gloo"
    device_module.set_device(rank)
    return f"{device_type}:{dist.Backend.default_device_backend_map[device_type]},cpu:gloo"


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _failure_message(error: BaseException) -> bytes:
    failed_at = time.monotonic()
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(("failure", failed_at, text, error))
        pickle.loads(message)  # some exceptions pickle but cannot be rebuilt
        return message
    except Exception:
        return pickle.dumps(("failure", failed_at, text, None))


def _collect(
    processes: list[BaseProcess],
    pipes: list[Connection],
    stack_folder: Path,
    timeout_seconds: float,
    progress: Path | None,
) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, BaseException | None]] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and progress is not None and not failures:
            seconds_left = progress.stat().st_mtime + timeout_seconds - time.time()
            if seconds_left > 0:
                deadline = time.monotonic() + seconds_left
                continue
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            kind, *payload = _receive(pipe, processes[rank])
            if kind == "result":
                results[rank] = payload[0]
            else:
                failed_at, text, error = payload
                failures.append((failed_at, rank, text, error))
                # The others now wait for a rank that is gone: don't wait for them for long.
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHER_FAILURES)
    if failures:
        # Whoever fails first takes the others' connections along.
        failures.sort(key=lambda failure: failure[0])
        _, rank, text, error = failures[0]
        also = f" (then also {[r for _, r, *_ in failures[1:]]})" if failures[1:] else ""
        raise RankFailure(f"rank {rank} failed first{also}:\n{text}") from error
    if waiting:
        raise RankTimeout(_describe_hang(sorted(waiting.values()), processes, stack_folder))
    return [results[rank] for rank in range(len(processes))]


def _receive(pipe: Connection, process: BaseProcess) -> tuple:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(timeout=5)
        text = f"the process ended without a word, exit code {process.exitcode}"
        return "failure", -math.inf, text, None  # nothing else kills a process: the first cause


def _describe_hang(ranks: list[int], processes: list[BaseProcess], stack_folder: Path) -> str:
    stacks = [f"ranks {ranks} of {len(processes)} did not end in time and were killed."]
    if not hasattr(faulthandler, "register"):
        return stacks[0]
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    for rank in ranks:
        path = _stack_path(stack_folder, rank)
        stacks.append(f"rank {rank}:\n{path.read_text() if path.exists() else 'not started yet'}")
    return "\n".join(stacks)


def _stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.stack"
