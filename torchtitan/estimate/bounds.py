"""Bounds on the time of a step, from its counts and a machine's peak rates."""

import argparse
import dataclasses
import math
from typing import Any

# Mesh axes whose collectives block the next operator; other axes' collectives can overlap computation.
IN_LINE = ("tp", "cp", "ep", "etp")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peak rates of one GPU. flops: FLOP/s in bf16, dense. nvlink, network: bytes/s in one direction.

    memory: bytes/s, reads plus writes.
    """

    flops: float
    nvlink: float
    network: float
    gpus_per_node: int
    memory: float = math.inf


def without_memory(machine: Machine) -> Machine:
    """Return the machine with unlimited memory bandwidth. Compiled steps move fewer bytes than counted."""
    return dataclasses.replace(machine, memory=math.inf)


@dataclasses.dataclass(frozen=True)
class Bound:
    """Lower bounds on the time of a step on a machine, in seconds.

    compute: matrix products and attention at peak FLOP/s. memory: reads and writes of all other
    operators, without fusion. in_line: collectives that block the next operator. beside: all other
    collectives, which can overlap computation. Collectives take the longer of NVLink and network time.
    step: max((compute + memory + in_line) * (1 + the pipeline's bubble), beside).
    """

    compute: float
    memory: float
    in_line: float
    beside: float
    step: float
    mfu: float


def bound_of(estimate: Any, machine: Machine) -> Bound:
    """Return the bounds of the step that `estimate`, a `StepEstimate` for this machine, describes."""

    def seconds(in_line: bool) -> float:
        on_nvlink = on_network = 0.0
        for (axis, _), traffic in estimate.counts.traffic.items():
            if (axis in IN_LINE) == in_line:
                on_nvlink += traffic.sent / machine.nvlink
                on_network += traffic.network / machine.network
        return max(on_nvlink, on_network)

    flops = estimate.counts.flops
    compute = (flops["matrix products"] + flops["attention"]) / machine.flops
    memory = estimate.counts.moved / machine.memory
    in_line, beside = seconds(True), seconds(False)
    busy = (compute + memory + in_line) * (1 + estimate.bubble)
    step = max(busy, beside)
    mfu = estimate.model_flops / (estimate.world_size * step * machine.flops)
    return Bound(compute, memory, in_line, beside, step, mfu)


def depths_of(config: Any) -> tuple[int, int] | None:
    """Return two depths (numbers of layers) from which a step is extrapolated linearly to the model's depth.
    Both depths fill the stages of a pipeline evenly, and have the kinds of layers in the model's proportions.
    None if the config itself assigns the layers to stages, or if the kinds of layers do not repeat.
    """
    # Imported here, because these modules import torch, which has to wait for `prepare_device`.
    from torchtitan.config.pipeline_layout import SINGLE_STAGE_SCHEDULES, is_one_of
    from torchtitan.job import find_train_spec

    args = find_train_spec(config).model_args[config.model.flavor]
    types = getattr(args, "layer_types", ())
    n_types = next((n for n in range(1, len(types)) if types[n:] == types[:-n]), len(types)) or 1
    if n_types == len(types) > 1:
        return None
    parallelism = config.parallelism
    pp = parallelism.pipeline_parallel_degree
    option = config.activation_checkpoint.selective_ac_option
    is_by_layers = config.activation_checkpoint.mode == "selective" and option.isdigit()
    # The pattern of recomputed layers and of kinds of layers repeats every `period` layers.
    period = math.lcm(int(option) if is_by_layers else 1, n_types)
    if pp == 1:
        # At least 4, because the first layers may differ from later layers, and odd from even layers.
        low = n_types * -(-4 // n_types)
        return low, low + math.lcm(2, period)
    if parallelism.pipeline_parallel_layers_per_stage or parallelism.module_fqns_per_model_part:
        return None
    is_single = is_one_of(parallelism.pipeline_parallel_schedule, SINGLE_STAGE_SCHEDULES)
    n_stages = pp if is_single else 2 * pp
    # The embeddings count as `first` layers, and the logits as `last` layers.
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    low = n_types * -(-(1 + max(1, first, last)) // n_types)
    return low * n_stages - first - last, (low + period) * n_stages - first - last


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peak-tflops", type=float, default=989, help="of one GPU in bf16")
    parser.add_argument(
        "--nvlink-gbs", type=float, default=450, help="GB/s of a GPU, one direction"
    )
    parser.add_argument("--network-gbs", type=float, default=50, help="GB/s of a GPU's share")
    parser.add_argument("--memory-gbs", type=float, default=3350, help="GB/s of a GPU's memory")
    parser.add_argument("--gpus-per-node", type=int, default=8)


def machine_of(args: argparse.Namespace) -> Machine:
    return Machine(
        flops=args.peak_tflops * 1e12,
        nvlink=args.nvlink_gbs * 1e9,
        network=args.network_gbs * 1e9,
        gpus_per_node=args.gpus_per_node,
        memory=args.memory_gbs * 1e9,
    )
