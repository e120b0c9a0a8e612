"""The share of an RL run's weights that change in a step, in bf16 and in the dtype of training.

    python benchmarks/rl_changes.py [--steps 26] --job.config_file FILE [FLAG ...]

Flags are those of torchtitan.rl.train. If weights are pushed in bf16, `rl.weight_sync.delta` sends the
weights that change in bf16. Runs in one process.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from torchtitan.checkpoint.stream import WeightStream
from torchtitan.config import ConfigManager
from torchtitan.rl.controller import Controller
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.weight_changes import bytes_of
from torchtitan.rl.weight_sync import OurNames, copied

WORDS = {2: torch.int16, 4: torch.int32}


def words_of(controller: Controller, dtype: torch.dtype | None) -> Tensor:
    """All weights as integers of their bits [n]."""
    weights = WeightStream.from_engine(controller.trainer.engine, OurNames(), dtype=dtype)
    size = (dtype or torch.float32).itemsize
    tensors = [bytes_of(tensor) for _, tensor in copied(weights, None) if tensor.itemsize == size]
    return torch.cat(tensors).view(WORDS[size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=26)
    args, flags = parser.parse_known_args()
    controller = Controller(ConfigManager(JobConfig).parse_args(flags))
    controller.setup()
    dtypes = {"bf16": torch.bfloat16, "fp32": None}
    before = {name: words_of(controller, dtype) for name, dtype in dtypes.items()}
    for step in range(1, args.steps + 1):
        lr = controller.train_step()["lr"]
        after = {name: words_of(controller, dtype) for name, dtype in dtypes.items()}
        shares = [f"{(after[x] != before[x]).float().mean():.2%} in {x}" for x in dtypes]
        print(f"changed in step {step}, with a learning rate of {lr:.1e}: {', '.join(shares)}")
        before = after
    controller.close()


if __name__ == "__main__":
    main()
