"""The planner against what happens: memory on this CPU, and published figures.

    python -m scripts.estimate.check memory       # ten jobs, 1 to 4 gloo ranks
    python -m scripts.estimate.check published    # Llama 3.1 on 8 to 512 H100

docs/measured.md has what they printed.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from typing import Any

from scripts.estimate.scale import FULL, LLAMA, MODELS, PP, TP
from torchtitan.estimate.bounds import Machine, bound_of, depths_of, without_memory
from torchtitan.estimate.device import prepare_device
from torchtitan.estimate.plan import RESERVED_GIB, USABLE, Layout, plan_of
from torchtitan.testing.gloo import run_ranks

GIB, MIB = 2**30, 2**20
_P = "--parallelism."
# What a CPU without bf16 instructions computes in reasonable time.
FP32 = "--training.mixed_precision_param=float32"
NO_RECOMPUTATION = "--activation_checkpoint.mode=none"
EP2 = f"{_P}expert_parallel_degree=2"
CP2 = f"{_P}context_parallel_degree=2 {_P}context_parallel_rotate_method=alltoall"
BY_OPERATOR = "--activation_checkpoint.selective_ac_option=op"
INTERLEAVED = f"{_P}pipeline_parallel_schedule=Interleaved1F1B"
# (model, flavor, memory of a rank in GiB, layout, flags); 8 rows of 256 tokens in all, of which the
# planner takes as many at once as fit.
MEMORY_CASES = [
    ("llama3", "debugmodel", 80, Layout(1, 1, 1, 1, 1, 8), NO_RECOMPUTATION),
    ("llama3", "debugmodel", 1.35, Layout(1, 2, 1, 1, 1, 4), BY_OPERATOR),
    ("llama3", "debugmodel", 80, Layout(2, 2, 1, 1, 1, 2), FULL),
    ("llama3", "debugmodel", 1.4, Layout(1, 1, 2, 1, 1, 8), NO_RECOMPUTATION),
    ("llama3", "debugmodel", 80, Layout(1, 1, 1, 2, 1, 8), NO_RECOMPUTATION),
    ("llama3", "debugmodel", 80, Layout(1, 1, 1, 2, 1, 8), f"{FULL} {INTERLEAVED}"),
    ("llama3", "debugmodel", 80, Layout(1, 1, 1, 1, 2, 8), f"{NO_RECOMPUTATION} {CP2}"),
    ("llama3", "debugmodel", 80, Layout(1, 2, 2, 1, 1, 4), BY_OPERATOR),
    # The estimate is a GPU's, where keys and values are repeated for grouped heads in fp32.
    ("qwen3", "debugmodel", 80, Layout(1, 2, 1, 1, 1, 4), NO_RECOMPUTATION),
    ("qwen3", "debugmodel_moe_small", 80, Layout(1, 2, 1, 1, 1, 4), f"{NO_RECOMPUTATION} {EP2}"),
    ("deepseek_v3", "debugmodel", 2.0, Layout(1, 2, 1, 1, 1, 4), NO_RECOMPUTATION),
    ("gpt_oss", "debugmodel_small", 80, Layout(1, 1, 2, 1, 1, 8), FULL),
]
_BATCH, _NO_CHUNKS = "--training.local_batch_size=", "--training.loss_chunk=0"
_8B = f"{_BATCH}2 --activation_checkpoint.mode=selective {BY_OPERATOR} {_NO_CHUNKS}"
_70B = f"{TP}8 {_BATCH}16 {FULL} {_NO_CHUNKS}"
# Eight microbatches, as many as ranks of the pipeline.
_405B = (
    f"{TP}8 {PP}8 {_BATCH}32 {_P}pipeline_parallel_microbatch_size=4 {FULL} {_NO_CHUNKS} "
    f"{_P}pipeline_parallel_schedule="
)
# (preset, GPUs, layout, flags), then how it was computed, tokens/s of a GPU and GiB as published by
# PyTorch's torchtitan team: "llama3_h100_202412" and, without memory, "asyncTP_llama3_h100_2025-06".
PUBLISHED = [
    (("8b", 8, "FSDP 8", _8B), "bf16, compiled", 6667, 77.0),
    (("8b", 8, "FSDP 8", _8B), "bf16", 5762, 82.4),
    (("8b", 128, "FSDP 128", _8B), "bf16, compiled", 6514, 62.0),
    (("8b", 128, "FSDP 128", _8B), "bf16", 5605, 67.0),
    (("70b", 256, "FSDP 32, TP 8", _70B), "bf16, compiled", 597.3, None),
    (("70b", 256, "FSDP 32, TP 8", _70B), "float8, compiled", 829, 71.9),
    (("405b", 512, "FSDP 8, TP 8, PP 8", f"{_405B}1F1B"), "float8, async TP, compiled", 100, 82.5),
    (
        ("405b", 512, "FSDP 8, TP 8, PP 8, interleaved", f"{_405B}Interleaved1F1B"),
        "float8, async TP, compiled",
        128,
        72.7,
    ),
]
# Of the machine they were measured on: NVLink, 400 Gb/s of network for each GPU.
PUBLISHED_MACHINE = Machine(989e12, 450e9, 50e9, 8, memory=3.35e12)


# ---- on a rank ----


def measured_memory(config: Any) -> tuple[int, int, int]:
    """Bytes of (parameters and buffers, optimizer state, peak) of this rank in its second step."""
    import torch
    from torch.distributed.tensor import DTensor

    from torchtitan.engine import TrainingEngine

    def local_bytes(tensors: Any) -> int:
        return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)

    engine = TrainingEngine(config)
    step = _step_of(engine)
    step()
    parts = engine.model_parts
    parameters = local_bytes(t for part in parts for t in [*part.parameters(), *part.buffers()])
    states = engine.optimizers.state.values()
    optimizer_state = local_bytes(value for state in states for value in state.values())
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    engine.close()
    return parameters, optimizer_state, parameters + optimizer_state + highest


def _step_of(engine: Any) -> Any:
    """A function that trains one step on random tokens, of which each expert gets some."""
    import torch

    training = engine.job_config.training
    generator = torch.Generator().manual_seed(engine.dp_rank)
    shape = training.local_batch_size, training.seq_len
    tokens = torch.randint(0, engine.model_args.vocab_size, shape, generator=generator)

    def step() -> None:
        for _ in range(engine.gradient_accumulation_steps):
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=1.0
            )
        engine.optim_step()

    return step


# ---- the tables ----


def check_memory(only: str) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.estimate.step import estimate_from_depths

    print(
        "| model | ranks | GiB of each | layout | rows at once | predicted, MiB | measured | ratio |"
    )
    print("|" + "---|" * 8)
    for model, flavor, memory, layout, flags in MEMORY_CASES:
        if only not in f"{model} {flavor} {layout.name} {flags}":
            continue
        base = _small_job(ConfigManager(), f"--model.name={model} --model.flavor={flavor} {flags}")
        n_ranks = layout.replicas * layout.shards * layout.tp * layout.pp * layout.cp
        os.environ["NGPU"] = str(n_ranks)

        def estimate(config: Any, rank: int) -> Any:
            return estimate_from_depths(config, rank, 8, depths_of(config))

        found = plan_of(layout, base, USABLE * memory * GIB - RESERVED_GIB * GIB, estimate)
        name = f"{model} {flavor}, {_words(flags)}"
        if found is None:
            print(f"| {name} | {n_ranks} | {memory:g} | {layout.name} | does not fit | | | |")
            continue
        rows, (estimated, *_) = found
        config = layout.config(base, rows)
        real = run_ranks(
            measured_memory, n_ranks, config, init_process_group=False, timeout_seconds=3600
        )
        peak = max(peak for _, _, peak in real)
        print(
            f"| {name} | {n_ranks} | {memory:g} | {layout.name.replace('GPU', 'rank')} | {rows} of "
            f"{layout.rows} | {estimated.peak / MIB:.1f} | {peak / MIB:.1f} | "
            f"{estimated.peak / peak:.2f} |",
            flush=True,
        )


def _small_job(manager: Any, flags: str) -> Any:
    settings = f"{FP32} --training.seq_len=256 {_P}always_fsdp=False {flags}"
    folder = tempfile.mkdtemp()
    return manager.parse_args([f"--job.dump_folder={folder}", *settings.split()])


def _words(flags: str) -> str:
    """What stands in a table for the flags."""
    words = {
        NO_RECOMPUTATION: "no recomputation",
        FULL: "full recomputation",
        BY_OPERATOR: "recomputed by operator",
        INTERLEAVED: "interleaved",
        EP2: "EP 2",
    }
    return ", ".join(word for flag, word in words.items() if flag in flags)


def check_published(only: str) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.estimate.step import estimate_from_depths

    estimates: dict[Any, list[Any]] = {}
    for case, *_ in PUBLISHED:
        preset, n_gpus, layout, flags = case
        if case in estimates or only not in f"{preset} {layout}":
            continue
        path = MODELS / LLAMA.format(preset)
        config = ConfigManager().parse_args([f"--job.config_file={path}", *flags.split()])
        config.model.converters = []
        os.environ["NGPU"] = str(n_gpus)
        ranks = [0, n_gpus - 1] if config.parallelism.pipeline_parallel_degree > 1 else [0]
        estimates[case] = [
            estimate_from_depths(config, rank, 8, depths_of(config)) for rank in ranks
        ]

    def tokens_per_second(case: Any, computed: str, flops: float) -> float:
        machine = dataclasses.replace(PUBLISHED_MACHINE, flops=flops)
        if "compiled" in computed:
            machine = without_memory(machine)
        steps = [bound_of(estimate, machine).step for estimate in estimates[case]]
        return estimates[case][0].tokens / estimates[case][0].world_size / max(steps)

    # One rate for each kind of arithmetic, from the first job that used it.
    rates: dict[str, float] = {}
    print(
        "| model | GPUs | layout | computed in | tokens/s of a GPU, published | at most | published of"
        " that | predicted | ratio | GiB, published | predicted | ratio |"
    )
    print("|" + "---|" * 12)
    for case, computed, published, gib in PUBLISHED:
        if case not in estimates:
            continue
        at_most = tokens_per_second(case, computed, PUBLISHED_MACHINE.flops)
        kind = computed.partition(",")[0]
        if kind in rates:
            expected = tokens_per_second(case, computed, rates[kind])
            told = f"{expected:,.0f} | {expected / published:.2f}"
        else:
            job = case, computed
            rates[kind] = _rate_that_gives(published, lambda r, j=job: tokens_per_second(*j, r))
            told = f"gives {rates[kind] / 1e12:.0f} TFLOP/s |"
        peak = max(estimate.peak for estimate in estimates[case]) / GIB
        memory = f"{gib} | {peak:.1f} | {peak / gib:.2f}" if gib else f" | {peak:.1f} |"
        preset, n_gpus, layout, _ = case
        print(
            f"| llama3 {preset} | {n_gpus} | {layout} | {computed} | {published:,.0f} | "
            f"{at_most:,.0f} | {published / at_most:.2f} | {told} | {memory} |"
        )


def _rate_that_gives(wanted: float, tokens_per_second: Any) -> float:
    """FLOP/s at which a step has that many tokens per second, which grow with the rate."""
    low, high = 1e12, 1e16
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_second(middle) < wanted else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["memory", "published"])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    os.environ["LOCAL_RANK"] = "0"
    prepare_device()
    if args.what == "memory":
        check_memory(args.only)
    else:
        check_published(args.only)


if __name__ == "__main__":
    sys.exit(main())
