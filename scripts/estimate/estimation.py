"""What a step of a training job needs and sends on each device, without the devices.

    NGPU=8 python -m scripts.estimate.estimation --job.config_file X.toml [config overrides]

See docs/estimate.md for what the figures mean.
"""

import logging
import os
import sys
import time
import warnings

from tests.cuda_rehearsal import device


def prepare_device() -> None:
    """Have a device to rehearse on: this machine's, or one that computes nothing."""
    reason = device.why_not()
    if reason is None:
        device.load_device()
        device.patch_cuda()
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"there is no GPU to stand for those of the job, and none can be invented: {reason}; "
            "install torch's CPU build and g++ on Linux, or run this on a machine with a GPU"
        )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    os.environ.setdefault("NGPU", os.environ.get("WORLD_SIZE", ""))
    os.environ.setdefault("LOCAL_RANK", "0")
    prepare_device()
    from scripts.estimate.step import estimate_step
    from torchtitan.config import ConfigManager
    from torchtitan.config.manager import exit_on_config_error

    with exit_on_config_error():
        config = ConfigManager().parse_args()
        started = time.monotonic()
        print(estimate_step(config).as_table())
        if config.parallelism.pipeline_parallel_degree > 1:
            print(estimate_step(config, rank=int(os.environ["NGPU"]) - 1).as_table())
    print(f"estimated in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
