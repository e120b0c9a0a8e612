"""Compare the first losses of each family's debug model with the losses in the repository.

    python -m scripts.golden_losses                  # all families
    python -m scripts.golden_losses qwen3 gpt_oss    # some families
    python -m scripts.golden_losses --update         # store the new losses; say why in the commit

Ten steps in fp32 on the shipped data, in one process. Exit code 1 if a loss differs.

The bits of a loss depend on the machine, because the CPU's vector width changes the reduction order.
SSE kernels in place of AVX2 change these losses by at most 4.3e-7, relative; leaving out weight decay
changes them by 1.4e-4, a learning rate 1 % higher by more. TOLERANCE is between the two, and nearer
to the second, because a token with two experts whose scores differ only in the last bit may go to
the other expert on some machine.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

from torchtitan.config.manager import ConfigManager
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/assets/golden_losses.json"
TOLERANCE = 5e-5  # relative
FLAVORS = {
    "llama3": ("llama3", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3_moe": ("qwen3", "debugmodel_moe_small"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
    "llama4": ("llama4", "debugmodel"),
    "gpt_oss": ("gpt_oss", "debugmodel_small"),
}
LOSS = "loss_metrics/global_avg_loss"


def losses_of(family: str, *overrides: str) -> list[float]:
    """Return the losses of ten steps. overrides: further flags of the command line."""
    name, flavor = FLAVORS[family]
    with tempfile.TemporaryDirectory() as folder:
        config = ConfigManager().parse_args(
            [
                f"--job.dump_folder={folder}",
                f"--model.name={name}",
                f"--model.flavor={flavor}",
                f"--model.hf_assets_path={ROOT}/tests/assets/tokenizer",
                "--training.dataset=c4_test",
                "--training.steps=10",
                "--training.seq_len=32",
                "--training.local_batch_size=2",
                "--training.mixed_precision_param=float32",
                "--activation_checkpoint.mode=none",
                "--lr_scheduler.warmup_steps=2",
                "--debug.seed=42",
                "--metrics.log_freq=1",
                "--metrics.enable_jsonl",
                *overrides,
            ]
        )
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that the reduction order does not depend on the cores
        try:
            with Trainer(config) as trainer:
                trainer.train()
        finally:
            torch.set_num_threads(num_threads)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)[LOSS]) for line in lines]


def difference(losses: list[float], golden: list[float]) -> float:
    """Return the largest relative difference; infinite if the lists cannot be compared."""
    if len(losses) != len(golden) or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(losses, golden, strict=True))


def golden_losses() -> dict[str, list[float]]:
    return json.loads(GOLDEN.read_text())["losses"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FLAVORS))
    parser.add_argument("--update", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    args = parser.parse_args()
    if unknown := set(args.families) - FLAVORS.keys():
        parser.error(
            f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FLAVORS)}"
        )
    os.chdir(ROOT)
    init_logger()
    logger.setLevel("WARNING")
    losses = {family: losses_of(family) for family in args.families or FLAVORS}
    kept = golden_losses() if GOLDEN.exists() else {}
    num_wrong = 0
    for family, found in losses.items():
        largest = difference(found, kept.get(family, []))
        num_wrong += not largest <= TOLERANCE
        print(f"{family:12} {found[0]:.6f} … {found[-1]:.6f}  largest difference {largest:.1e}")
    if args.update:
        made = {"torch": torch.__version__, "machine": platform.machine()}
        text = json.dumps({"made_with": made, "losses": kept | losses}, indent=1)
        GOLDEN.write_text(text + "\n")
        print(f"{GOLDEN.relative_to(ROOT)} is written")
    elif num_wrong:
        sys.exit(f"{num_wrong} of {len(losses)} families differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
