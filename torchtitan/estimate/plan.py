"""Rank the parallel layouts of a model that fit on the given GPUs, by a lower bound on the step's time.

    torchtitan plan X.toml --gpus 64 --memory 80 [config overrides]

Tries all degrees of data, tensor and pipeline parallelism. Keeps the config's context and expert
parallelism and its global batch: `training.global_batch_size`, or `local_batch_size` rows per GPU.
A rank runs as many rows at once as fit, and accumulates gradients over the rest. Layouts whose parameters,
gradients and optimizer states alone do not fit are skipped. The step of each other layout is estimated
without a GPU, at two depths of the model (`torchtitan.estimate.step`), in about 15 seconds. Times are lower
bounds from the peak rates in the options, so trust only large differences between layouts; see docs/scale.md.
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.commands import SourceParser
from torchtitan.estimate.bounds import (
    Bound,
    add_machine_options,
    bound_of,
    depths_of,
    machine_of,
    without_memory,
)
from torchtitan.estimate.device import prepare_device

# Share of GPU memory to use, and GiB to leave to the allocator, CUDA and NCCL: see docs/estimate.md.
USABLE, RESERVED_GIB = 0.9, 1.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degree of each mesh axis. rows: rows of the global batch on each data-parallel rank."""

    replicas: int
    shards: int
    tp: int
    pp: int
    cp: int
    rows: int

    @property
    def name(self) -> str:
        parts = [f"PP {self.pp}", f"FSDP {self.shards}", f"CP {self.cp}", f"TP {self.tp}"]
        if self.replicas > 1:
            parts[1] = f"HSDP {self.replicas} x {self.shards}"
        kept = [part for part in parts if not part.endswith(" 1")]
        return ", ".join(kept) or "one GPU"

    def settings(self, rows_at_once: int) -> dict[str, dict[str, int]]:
        """Return the settings of the layout: section -> key -> value."""
        return {
            "parallelism": {
                "data_parallel_replicate_degree": self.replicas,
                "data_parallel_shard_degree": self.shards,
                "tensor_parallel_degree": self.tp,
                "pipeline_parallel_degree": self.pp,
                "context_parallel_degree": self.cp,
            },
            "training": {
                "local_batch_size": rows_at_once,
                "global_batch_size": self.rows * self.replicas * self.shards,
            },
        }

    def config(self, base: Any, rows_at_once: int) -> Any:
        config = copy.deepcopy(base)
        for section, values in self.settings(rows_at_once).items():
            for key, value in values.items():
                setattr(getattr(config, section), key, value)
        return config


@dataclasses.dataclass(frozen=True)
class Planned:
    """A layout, with the estimate of the rank with the highest peak memory and the slowest rank's bound."""

    layout: Layout
    rows_at_once: int
    estimate: Any
    bound: Bound


def layouts(config: Any, n_gpus: int, gpus_per_node: int, global_rows: int) -> Iterator[Layout]:
    """Yield the layouts that use every GPU and split the rows of the global batch evenly."""
    cp = config.parallelism.context_parallel_degree
    for tp in _divisors(min(n_gpus, gpus_per_node)):
        for pp in _divisors(n_gpus // tp):
            if n_gpus % (tp * pp * cp):
                continue
            dp = n_gpus // (tp * pp * cp)
            if global_rows % dp:
                continue
            for replicas in {1, max(1, dp * tp * cp // gpus_per_node)}:
                # Replicas save time only if each replica fits in a node.
                if dp % replicas == 0:
                    yield Layout(replicas, dp // replicas, tp, pp, cp, global_rows // dp)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def least_states(n_bytes: int, layout: Layout) -> float:
    """Return a rank's share of the model's `n_bytes` of states, if all stages have equal sizes."""
    return n_bytes / (layout.shards * layout.cp * layout.tp * layout.pp)


def plan_of(
    layout: Layout, base: Any, usable: float, estimate: Callable[[Any, int], Any]
) -> tuple[int, list[Any]] | None:
    """Return (most rows at once that fit into `usable` bytes, estimates of ranks, highest peak memory first).

    None if a single row does not fit or, under a pipeline, if `layout.rows` rows do not fit.
    """
    ranks = {0, layout.replicas * layout.shards * layout.tp * layout.pp * layout.cp - 1}
    ranks = sorted(ranks) if layout.pp > 1 else [0]

    def fullest_first(rows: int) -> list[Any]:
        estimates = [estimate(layout.config(base, rows), rank) for rank in ranks]
        return sorted(estimates, key=lambda estimate: -estimate.peak)

    # A pipeline runs all rows at once, because many microbatches make its bubble small.
    if layout.pp > 1:
        found = fullest_first(layout.rows)
        return (layout.rows, found) if found[0].peak <= usable else None
    one = fullest_first(1)
    if one[0].peak > usable or layout.rows == 1:
        return (1, one) if one[0].peak <= usable else None
    two = fullest_first(2)
    growth = max(two[0].peak - one[0].peak, 1)
    most = 1 + int((usable - one[0].peak) / growth)
    for rows in reversed([n for n in _divisors(layout.rows) if n <= most]):
        found = {1: one, 2: two}.get(rows) or fullest_first(rows)
        # Check, because `most` assumes linear growth.
        if found[0].peak <= usable:
            break
    return rows, found


def table_of(plans: list[Planned], memory_gib: float) -> str:
    lines = [
        "| layout | rows at once | of | peak, GiB | room | compute | memory | in line | beside | bubble "
        "| step, at least | tokens/s of a GPU |\n|" + "---|" * 12
    ]
    for plan in sorted(plans, key=lambda plan: plan.bound.step):
        peak, bound, estimate = plan.estimate.peak / 2**30, plan.bound, plan.estimate
        cells = [
            plan.layout.name,
            str(plan.rows_at_once),
            str(plan.layout.rows),
            f"{peak:.1f}",
            f"{100 * (1 - peak / memory_gib):.0f} %",
            f"{bound.compute:.2f} s",
            f"{bound.memory:.2f} s",
            f"{bound.in_line:.2f} s",
            f"{bound.beside:.2f} s",
            f"{100 * estimate.bubble:.0f} %",
            f"{bound.step:.2f} s",
            f"{estimate.tokens / estimate.world_size / bound.step:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def winner_of(plans: list[Planned]) -> str:
    """Return the settings of the fastest layout, as flags and as TOML."""
    best = min(plans, key=lambda plan: plan.bound.step)
    tables = best.layout.settings(best.rows_at_once)
    flags = [f"--{table}.{key} {n}" for table, keys in tables.items() for key, n in keys.items()]
    toml = [
        "\n".join([f"[{table}]", *(f"{key} = {n}" for key, n in keys.items())])
        for table, keys in tables.items()
    ]
    joined = "\n\n".join(toml)
    return (
        f"The fastest is {best.layout.name}, as flags:\n{' '.join(flags)}\n\nand as TOML:\n{joined}"
    )


def main() -> None:
    parser = SourceParser("torchtitan plan", __doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--memory", type=float, default=80, help="GiB of one GPU")
    parser.add_argument("--most", type=int, default=16, help="layouts to rehearse")
    add_machine_options(parser)
    args, config_args = parser.options_and_overrides()
    machine = machine_of(args)
    os.environ["LOCAL_RANK"], os.environ["NGPU"] = "0", str(args.gpus)
    prepare_device()
    from torchtitan.commands import errors_as_sentences
    from torchtitan.commands.source import job_of
    from torchtitan.estimate.step import bytes_of_states, estimate_from_depths
    from torchtitan.tools.errors import ConfigError

    with errors_as_sentences():
        base = job_of(args.source, args.config, config_args)
        # Leave out converters to 8 bits, because `machine.flops` is the peak in bf16. Keep adapters.
        base.model.converters = [name for name in base.model.converters if name == "lora"]
        states_of_model = bytes_of_states(base)
    if base.compile.applies_to("model"):
        machine = without_memory(machine)
    training = base.training
    global_rows = training.global_batch_size
    if global_rows < 0:
        global_rows = training.local_batch_size * args.gpus
    usable = USABLE * args.memory * 2**30 - RESERVED_GIB * 2**30

    def estimate(config: Any, rank: int) -> Any:
        return estimate_from_depths(config, rank, machine.gpus_per_node, depths_of(config))

    tried, plans = 0, []
    candidates = list(layouts(base, args.gpus, machine.gpus_per_node, global_rows))
    # Low tensor and pipeline degrees first, because ranks with high degrees wait for each other most.
    candidates.sort(key=lambda layout: (layout.tp * layout.pp, layout.replicas))
    for layout in candidates:
        states = least_states(states_of_model, layout)
        if states > usable:
            _tell(f"{layout.name}: parameters, gradients and states take {states / 2**30:.0f} GiB")
            continue
        if tried == args.most:
            _tell(f"{layout.name}: not rehearsed, see --most")
            continue
        tried += 1
        try:
            found = plan_of(layout, base, usable, estimate)
        except (ConfigError, ValueError) as error:
            _tell(f"{layout.name}: {error}")
            continue
        if found is None:
            _tell(f"{layout.name}: does not fit")
            continue
        rows, estimates = found
        bounds = [bound_of(estimated, machine) for estimated in estimates]
        bound = max(bounds, key=lambda bound: bound.step)
        plans.append(Planned(layout, rows, estimates[0], bound))
        _tell(f"{layout.name}: {estimates[0].peak / 2**30:.1f} GiB, {bound.step:.2f} s")
    if not plans:
        sys.exit(
            f"no layout of {args.gpus} GPUs with {args.memory:g} GiB fits; give more GPUs, shorter "
            "rows (training.seq_len), or activation_checkpoint.mode = 'full'"
        )
    print(f"{table_of(plans, args.memory)}\n\n{winner_of(plans)}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
