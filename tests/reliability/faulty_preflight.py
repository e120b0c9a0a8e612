"""`torchtitan preflight` several times on the ranks of one job, each time with a fault on a rank."""

import os
import time
from unittest.mock import patch

import torch.distributed as dist

from torchtitan.commands import preflight
from torchtitan.config.manager import parse_args_or_exit
from torchtitan.distributed.processes.peers import PeerError
from torchtitan.tools.logging import init_logger

RANK = int(os.environ["RANK"])
real_time, real_exchange = time.time, dist.batch_isend_irecv


def slow_exchange(pair):
    if {RANK, pair[0].peer} == {1, 2}:
        time.sleep(0.2)
    return real_exchange(pair)


def open_full(_path, *_, **options):
    return open("/dev/full", "wb", **options)


# What is patched on rank 1; the slow pair on all ranks.
FAULTS = {
    "good": [],
    "slow pair": [
        patch.object(preflight, "SMALLEST_SHARE", 0.5),
        patch.object(dist, "batch_isend_irecv", slow_exchange),
    ],
    "clock": [patch.object(preflight.time, "time", lambda: real_time() - 90)],
    "full disk": [
        patch.dict(os.environ, LOCAL_RANK="0"),  # as on a host of its own
        patch.object(preflight, "open_file", open_full),
    ],
    "folder that is not shared": [],
    "other version": [patch.object(preflight.torch, "__version__", "2.9.0")],
    "stuck": [patch.object(preflight.Checks, "all_reduce", lambda _: time.sleep(60))],
}


def main() -> None:
    init_logger()
    preflight.SMALLEST_SHARE = 0.01  # a busy machine slows down any pair
    config = parse_args_or_exit()
    folder = config.job.dump_folder
    for fault, patches in FAULTS.items():
        config.checkpoint.enable = fault == "folder that is not shared"
        config.job.dump_folder = f"{folder}/own{RANK}" if config.checkpoint.enable else folder
        print(f"== {fault}", flush=True)
        if fault == "stuck":
            preflight.SECONDS_STUCK, preflight.SECONDS_PER_COLLECTIVE = 0.5, 3
        on_this_rank = patches if RANK == 1 or fault == "slow pair" else []
        for one in on_this_rank:
            one.start()
        try:
            print("failed" if preflight.run(config) else "passed", flush=True)
        except PeerError:
            print("ranks differ", flush=True)
        except RuntimeError as error:
            raise SystemExit(1) from error
        for one in on_this_rank:
            one.stop()


if __name__ == "__main__":
    main()
