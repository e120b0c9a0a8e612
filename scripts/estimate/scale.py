"""What steps of large models need and send on 8, 64 and 512 GPUs.

    python -m scripts.estimate.scale [--only 70b]

Each row is one rank at full width and batch (`torchtitan.estimate.step`), of a pipeline one of the
first and one of the last stage. Models of two depths are rehearsed, and all layers follow from
them; `--whole` rehearses all, which takes minutes for each row and gives the same. Nothing is measured: bytes and FLOPs are counted, and the
times are bounds that follow from them and from the peaks given as options.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.estimate.bounds import (
    IN_LINE,
    Machine,
    add_machine_options,
    bound_of,
    depths_of,
    machine_of,
)
from torchtitan.estimate.device import prepare_device

MODELS = Path(__file__).resolve().parents[2] / "torchtitan/models"
_P = "--parallelism."
TP, CP = f"{_P}tensor_parallel_degree=", f"{_P}context_parallel_degree="
PP, EP = f"{_P}pipeline_parallel_degree=", f"{_P}expert_parallel_degree="
REPLICAS, BATCH = f"{_P}data_parallel_replicate_degree=", "--training.local_batch_size="
# 128k tokens per row; attention trades tokens for heads, whose traffic does not depend on data.
LONG = f"--training.seq_len=131072 {_P}context_parallel_rotate_method=alltoall"
FULL = "--activation_checkpoint.mode=full"
LLAMA = "llama3/train_configs/llama3_{}.toml"
# (preset, GPUs, layout, flags over the preset's); but for long rows, those of one preset have one
# global batch
CASES = [
    (LLAMA.format("8b"), 8, "FSDP 8", ""),
    (LLAMA.format("8b"), 8, "FSDP 4, TP 2", f"{TP}2 {BATCH}2"),
    (LLAMA.format("8b"), 8, "CP 8, 128k rows", f"{CP}8 {LONG}"),
    (LLAMA.format("70b"), 64, "FSDP 8, TP 8", ""),
    (LLAMA.format("70b"), 64, "HSDP 2 x 4, TP 8", f"{REPLICAS}2"),
    (LLAMA.format("70b"), 64, "FSDP 64", f"{TP}1 {BATCH}1"),
    (LLAMA.format("405b"), 512, "FSDP 64, TP 8", ""),
    (LLAMA.format("405b"), 512, "HSDP 8 x 8, TP 8", f"{REPLICAS}8"),
    (LLAMA.format("405b"), 512, "PP 8, FSDP 8, TP 8", f"{PP}8 {BATCH}16"),
    (LLAMA.format("405b"), 512, "FSDP 4, CP 16, TP 8, 128k rows", f"{CP}16 {LONG} {BATCH}1"),
    (
        "deepseek_v3/train_configs/deepseek_v3_671b.toml",
        512,
        "FSDP 512, EP 64, full AC",
        f"{EP}64 {FULL}",
    ),
]
_HEADERS = (
    "| model | GPUs | layout | tokens | states | peak | sends: fsdp, replicas | tp, cp, ep | pp "
    "| out of the node | collectives |\n|" + "---|" * 11,
    "| model | GPUs | layout | compute | memory | in line | beside | bubble | step, at least | tokens/s of a "
    "GPU | MFU, at most |\n|" + "---|" * 11,
)


def rows_of(name: str, layout: str, estimate: Any, machine: Machine) -> tuple[str, str]:
    """One row of each table."""
    gib = 2**30
    traffic = estimate.counts.traffic

    def sent(*axes: str) -> str:
        total = sum(t.sent for (axis, _), t in traffic.items() if axis in axes) / gib
        return f"{total:.1f}" if total > 0.05 else ""

    states = estimate.parameters + estimate.gradients + estimate.optimizer_state
    network = sum(t.network for t in traffic.values())
    calls = sum(t.calls for t in traffic.values())
    head = [name, str(estimate.world_size), layout]
    needs = [
        *head,
        f"{estimate.tokens / 2**20:.2f} M",
        f"{states / gib:.1f}",
        f"{estimate.peak / gib:.1f}",
        sent("fsdp", "efsdp", "dp_replicate"),
        sent(*IN_LINE),
        sent("pp"),
        f"{network / gib:.1f}" if network else "",
        f"{calls:.0f}",
    ]
    bound = bound_of(estimate, machine)
    times = [
        *head,
        f"{bound.compute:.2f} s",
        f"{bound.memory:.2f} s",
        f"{bound.in_line:.2f} s" if bound.in_line else "",
        f"{bound.beside:.2f} s",
        f"{100 * estimate.bubble:.0f} %" if estimate.bubble else "",
        f"{bound.step:.2f} s",
        f"{estimate.tokens / estimate.world_size / bound.step:,.0f}",
        f"{100 * bound.mfu:.0f} %",
    ]
    return f"| {' | '.join(needs)} |", f"| {' | '.join(times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name or layout contains this")
    add_machine_options(parser)
    parser.add_argument("--whole", action="store_true", help="all layers instead of two depths")
    args = parser.parse_args()
    machine = machine_of(args)
    os.environ["LOCAL_RANK"] = "0"
    prepare_device()
    from torchtitan.config import ConfigManager
    from torchtitan.estimate.step import estimate_from_depths

    tables: tuple[list[str], list[str]] = ([], [])
    for preset, n_gpus, layout, flags in CASES:
        name = Path(preset).stem.replace("_", " ")
        if args.only not in f"{name}, {layout}":
            continue
        config = ConfigManager().parse_args(
            [f"--job.config_file={MODELS / preset}", *flags.split()]
        )
        config.model.converters = []  # all in bf16, whose peak is given
        os.environ["NGPU"] = str(n_gpus)
        ranks = {"": 0}
        if config.parallelism.pipeline_parallel_degree > 1:
            ranks = {", first stage": 0, ", last stage": n_gpus - 1}
        for stage, rank in ranks.items():
            started = time.process_time()
            job = config, rank, machine.gpus_per_node
            estimate = estimate_from_depths(*job, None if args.whole else depths_of(config))
            rows = rows_of(name, layout + stage, estimate, machine)
            for table, row in zip(tables, rows, strict=True):
                table.append(row)
            seconds = time.process_time() - started
            print(f"{rows[0]}\n{rows[1]} {seconds:.0f} CPU seconds", file=sys.stderr, flush=True)
    for header, table in zip(_HEADERS, tables, strict=True):
        print("\n".join([header, *table, ""]))


if __name__ == "__main__":
    main()
