"""`torchtitan preflight` on a rank whose machine has the fault that the variable FAULT names."""

import os
import sys
import time

import torch.distributed as dist

from torchtitan.commands import preflight

RANK, FAULT = int(os.environ.get("RANK", "0")), os.environ.get("FAULT")
preflight.SMALLEST_SHARE = 0.01  # a busy machine slows down any pair
real_time, real_exchange = time.time, dist.batch_isend_irecv


def slow_exchange(pair):
    if {RANK, pair[0].peer} == {1, 2}:
        time.sleep(1)  # 0.016 GB/s
    return real_exchange(pair)


if FAULT == "slow pair":
    preflight.SMALLEST_SHARE = 0.5
    dist.batch_isend_irecv = slow_exchange
elif FAULT == "clock" and RANK == 1:
    time.time = lambda: real_time() - 90
elif FAULT == "versions" and RANK == 1:
    preflight.torch.__version__ = "2.9.0"
elif FAULT == "full disk" and RANK == 1:
    os.environ["LOCAL_RANK"] = "0"  # as on a host of its own
    preflight.open = lambda _path, *_, **options: open("/dev/full", "wb", **options)
elif FAULT == "absent":
    preflight.SECONDS_TO_ARRIVE = 6.0
    if RANK == 2:
        sys.exit(0)
elif FAULT == "stuck":
    preflight.SECONDS_PER_LOOK = 5.0
    if RANK == 1:
        preflight.Rank.all_reduce = lambda self: time.sleep(60)

if __name__ == "__main__":
    preflight.main()
