"""Runs checks of a copy of torchtitan 0.2.2 on CPU processes: python rehearse.py JOBS_FILE.

The file has a list of jobs {"folder", "checks", "ranks", "result"}; rank 0 writes what its checks
return to "result". Third-party modules are imported once, and each job runs in forks of this process.
"""

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import random
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

HEAVY = (
    "torch.distributed.fsdp torch.distributed.pipelining torch.distributed.checkpoint "
    "torch.distributed.tensor.parallel torch.nn.attention.flex_attention "
    "torch.nn.attention.varlen torch._dynamo torch._inductor.config torch.utils.tensorboard "
    "torch.distributed.checkpoint.stateful torchdata.stateful_dataloader datasets tokenizers tyro torchao "
    "torch._inductor.compile_fx networkx"
)


def run_rank(folder: str, checks: list[str], rank: int, ranks: int, port: int, result: str):
    sys.path[0] = folder
    sys.path.append(str(Path(__file__).parent))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["MASTER_ADDR"] = "localhost"
    values = {}
    try:
        module = importlib.import_module("reference_checks")
        for i, name in enumerate(checks):
            os.environ["MASTER_PORT"] = str(port + i)  # the last check's may not be free again yet
            values[name] = getattr(module, name)()
    except BaseException:
        values["error"] = traceback.format_exc()
    if rank == 0 or "error" in values and not Path(result).exists():
        part = Path(f"{result}.{rank}")
        part.write_text(json.dumps(values))
        part.replace(result)
    os._exit(0)  # without waiting for groups whose other rank may have failed


def free_port() -> int:
    """Return the first of 40 ports below those that the system deals out to other tests."""
    while True:
        port = random.randrange(15000, 30000, 40)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("localhost", port))
            return port


def run(job: dict) -> None:
    """Run a job, again if another program took one of its ports in the meantime."""
    folder, checks, ranks, result = (job[key] for key in ("folder", "checks", "ranks", "result"))
    context, file = mp.get_context("fork"), Path(result)
    for _ in range(3):
        file.unlink(missing_ok=True)
        port, deadline = free_port(), time.monotonic() + 500
        processes = [
            context.Process(target=run_rank, args=(folder, checks, rank, ranks, port, result))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            wait([p.sentinel for p in processes if p.is_alive()], timeout=5)
            if file.exists() and "error" in json.loads(file.read_text()):
                break  # the other rank would wait for this one
        for process in processes:
            process.kill()
            process.join()
        if not (file.exists() and "EADDRINUSE" in file.read_text()):
            return


if __name__ == "__main__":
    for name in HEAVY.split():
        with contextlib.suppress(ImportError):  # a package that 0.2.2 does without
            importlib.import_module(name)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, jobs))
