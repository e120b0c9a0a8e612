"""Estimate what a step of a training job allocates, sends and computes on a rank; see docs/estimate.md."""

import os
import sys
import time

from torchtitan.commands import SourceParser
from torchtitan.estimate.device import prepare_device


def main() -> None:
    parser = SourceParser("torchtitan estimate", __doc__)
    parser.add_argument("--gpus", type=int, default=None, help="ranks of the job (default: $NGPU)")
    options, overrides = parser.options_and_overrides()
    ranks = options.gpus or os.environ.get("NGPU") or os.environ.get("WORLD_SIZE", "")
    if not ranks:
        parser.error("give --gpus, the number of the job's ranks, or set NGPU")
    os.environ["NGPU"] = str(ranks)
    os.environ.setdefault("LOCAL_RANK", "0")
    prepare_device()  # must run before torch is imported
    from torchtitan.commands import errors_as_sentences
    from torchtitan.commands.source import job_of
    from torchtitan.estimate.step import estimate_step

    with errors_as_sentences():
        config = job_of(options.source, options.config, overrides)
        started = time.monotonic()
        print(estimate_step(config).as_table())
        if config.parallelism.pipeline_parallel_degree > 1:
            print(estimate_step(config, rank=int(ranks) - 1).as_table())
    print(f"estimated in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
