"""Rules about parallel degrees: their values, their product, and whether they fit the model's sizes."""

import csv
import math
import re
from collections.abc import Iterator
from typing import Any

from torchtitan.config.checks.common import (
    DEGREES,
    attn_type_of,
    clash,
    compile_settings,
    compiled_model,
    data_sections,
    divides,
    has_experts,
    one_of,
    problem_in,
    shard_degree,
)
from torchtitan.config.context_layout import sequence_multiple
from torchtitan.config.job_config import JobConfig, Optimizer
from torchtitan.config.pipeline_layout import (
    CSV_SCHEDULES,
    SCHEDULES,
    is_one_of,
    modules_of_stages,
    splits_backward,
)
from torchtitan.tools.files import open_file


def world_size(job_config: JobConfig, world_size: int) -> Iterator[str]:
    degrees = {name: getattr(job_config.parallelism, name) for name in DEGREES}
    degrees["data_parallel_shard_degree"] = shards = shard_degree(job_config, world_size)
    product, apart = math.prod(degrees.values()), job_config.ranks_apart
    if product == world_size:
        return
    listed = ", ".join(f"{name} = {degree}" for name, degree in degrees.items())
    remedy = f"start {product + apart} processes"
    if world_size % (product // shards) == 0:
        fitting = world_size * shards // product
        remedy += f", or set data_parallel_shard_degree = {fitting} (or -1)"
    yield (
        f"the parallelism degrees must multiply to the number of processes, got {world_size} "
        f"processes{f' that train (and {apart} that generate)' if apart else ''} and a product of "
        f"{product}: {listed}; {remedy}"
    )


def global_batch_size(job_config: JobConfig, world_size: int) -> Iterator[str]:
    training = job_config.training
    global_batch = training.global_batch_size
    if global_batch == -1:
        return
    replicas = job_config.parallelism.data_parallel_replicate_degree
    dp = replicas * shard_degree(job_config, world_size)
    unit = training.local_batch_size * dp
    if global_batch % unit:
        nearest = max(1, round(global_batch / unit)) * unit
        yield (
            f"training.global_batch_size must be a multiple of local_batch_size * data-parallel ranks, "
            f"got {global_batch} with {training.local_batch_size} * {dp}; the nearest that fits is {nearest}"
        )
    if job_config.optimizer.early_step_in_backward and global_batch > unit:
        yield (
            f"optimizer.early_step_in_backward accumulates no gradients, got training.global_batch_size "
            f"= {global_batch}; set global_batch_size to {unit} or turn early_step_in_backward off"
        )


def ranks_for_experts(job_config: JobConfig, world_size: int) -> Iterator[str]:
    parallelism = job_config.parallelism
    ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    dp_shard = shard_degree(job_config, world_size)
    ranks = dp_shard * cp * tp
    # Without expert parallelism, expert_tensor_parallel_degree has no effect.
    if (ep > 1 and etp not in (1, tp)) or ranks % etp:
        yield (
            f"parallelism.expert_tensor_parallel_degree must be 1 or equal tensor_parallel_degree, "
            f"got {etp} with {tp}; set it to {' or '.join(map(str, {1, tp}))}"
        )
    names = "data_parallel_shard_degree * context_parallel_degree * tensor_parallel_degree"
    what = f"{names} / expert_tensor_parallel_degree = {dp_shard} * {cp} * {tp} / {etp}"
    yield from divides("parallelism.expert_parallel_degree", ep, what, ranks // etp)


def tensor_parallel(job_config: JobConfig) -> Iterator[str]:
    yield from async_tensor_parallel(job_config)
    degree = job_config.parallelism.tensor_parallel_degree
    for name in job_config.model.converters if degree > 1 else ():
        if name.startswith("quantize.grouped_mm."):
            needed = f"parallelism.tensor_parallel_degree = 1, got {degree}"
            yield f"{name} in model.converters needs {needed}; take it out"


def async_tensor_parallel(job_config: JobConfig) -> Iterator[str]:
    parallelism = job_config.parallelism
    if not parallelism.enable_async_tensor_parallel:
        return
    yield from compiled_model(job_config, "parallelism.enable_async_tensor_parallel")
    degree = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    if job_config.training.seq_len % degree:
        yield (
            f"parallelism.enable_async_tensor_parallel needs a training.seq_len that TP * CP ranks "
            f"divide, got {job_config.training.seq_len} with {degree}; choose a multiple, or turn it off"
        )


def tensor_parallel_sizes(job_config: JobConfig, model_args: Any) -> Iterator[str]:
    parallelism = job_config.parallelism
    names = ["n_heads", "n_kv_heads", "all_kv_heads", "vocab_size", "ffn_hidden_dim", "inter_dim"]
    if not has_experts(model_args):
        names += ["hidden_dim"]
    elif parallelism.expert_parallel_degree == 1 or parallelism.expert_tensor_parallel_degree > 1:
        names += ["expert_hidden_dim", "moe_inter_dim"]
    if getattr(model_args, "n_linear_layers", 0):
        names += ["linear_key_heads"]
    sizes = {name: size for name in names if (size := getattr(model_args, name, None))}
    for name, size in sizes.items():
        what = f"{name} of flavor {job_config.model.flavor!r}"
        degree = parallelism.tensor_parallel_degree
        choices = sizes.values()
        yield from divides("parallelism.tensor_parallel_degree", degree, what, size, *choices)


def experts(job_config: JobConfig, model_args: Any) -> Iterator[str]:
    ep, flavor = job_config.parallelism.expert_parallel_degree, job_config.model.flavor
    if ep == 1:
        return
    if not has_experts(model_args):
        yield (
            f"parallelism.expert_parallel_degree above 1 needs a flavor with experts, got {ep} "
            f"with {job_config.model.name!r} flavor {flavor!r}, which has none; set it to 1"
        )
    what, num_experts = f"the experts of flavor {flavor!r}", model_args.moe_args.num_experts
    yield from divides("parallelism.expert_parallel_degree", ep, what, num_experts)


def context_parallel(job_config: JobConfig, model_args: Any, builds_data: bool) -> Iterator[str]:
    """Dataloader rows must split evenly over context-parallel ranks; an engine pads the rows it is given."""
    parallelism = job_config.parallelism
    cp, balancer = parallelism.context_parallel_degree, parallelism.context_parallel_load_balancer
    if cp == 1:
        return
    yield from problem_in(sequence_multiple, balancer, cp)
    multiple = sequence_multiple(balancer, cp)
    for name, section in data_sections(job_config).items() if builds_data else ():
        seq_len = section.seq_len
        if seq_len % multiple:
            nearest = max(1, round(seq_len / multiple)) * multiple
            yield (
                f"{name}.seq_len must be a multiple of {multiple} for context_parallel_degree = "
                f"{cp} with load balancer {balancer!r}, got {seq_len}; the nearest is {nearest}"
            )
    if balancer == "ptrr" and attn_type_of(job_config, model_args) == "sdpa":
        yield (
            "parallelism.context_parallel_load_balancer = 'ptrr' balances by a mask, which model.attn_type "
            "= 'sdpa' does not have; set the balancer to 'headtail', or the type to 'flex' or 'varlen'"
        )
    if getattr(model_args, "n_linear_layers", 0):
        heads = model_args.linear_key_heads // parallelism.tensor_parallel_degree
        what = "a rank's key heads of linear attention"
        yield from divides("parallelism.context_parallel_degree", cp, what, heads)
    if parallelism.context_parallel_rotate_method == "alltoall":
        heads = getattr(model_args, "n_heads", 0) // parallelism.tensor_parallel_degree
        what = "a rank's attention heads, which context_parallel_rotate_method = 'alltoall' splits"
        yield from divides("parallelism.context_parallel_degree", cp, what, heads)


def pipeline_schedule(job_config: JobConfig) -> Iterator[str]:
    parallelism = job_config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return
    name = parallelism.pipeline_parallel_schedule
    csv_path = parallelism.pipeline_parallel_schedule_csv
    if not is_one_of(name, SCHEDULES):
        yield from one_of("parallelism.pipeline_parallel_schedule", name, SCHEDULES)
    if is_one_of(name, CSV_SCHEDULES) and not csv_path:
        yield (
            f"parallelism.pipeline_parallel_schedule = {name!r} reads its schedule from a CSV file; set "
            f"pipeline_parallel_schedule_csv to its path, or choose another schedule"
        )
    if csv_path:
        yield from _csv_file(csv_path, parallelism.pipeline_parallel_degree)
    if job_config.compile.applies_to("model") and splits_backward(parallelism):
        key, value = ("schedule_csv", csv_path) if csv_path else ("schedule", name)
        yield (
            f"parallelism.pipeline_parallel_{key} = {value!r} splits the backward, which compiled blocks "
            f"cannot do, got {compile_settings(job_config)}; turn compile off for 'model', or take '1F1B'"
        )
    rows, what = job_config.training.local_batch_size, "training.local_batch_size"
    microbatch = parallelism.pipeline_parallel_microbatch_size
    yield from divides("parallelism.pipeline_parallel_microbatch_size", microbatch, what, rows)


# A cell of the CSV file: <stage><action><microbatch>, two overlapped actions in parentheses, or nothing.
_ACTION = r"\d{1,6}[A-Z_]{1,20}(\d{1,9})?"
_CELL = re.compile(rf"\s*({_ACTION}|\({_ACTION};{_ACTION}\)OVERLAP_F_B|)\s*")


def _csv_file(path: str, n_ranks: int) -> Iterator[str]:
    key = f"parallelism.pipeline_parallel_schedule_csv = {path!r}"
    remedy = "write a line per pipeline rank, of cells like 0F0, 0B0 (stage, action, microbatch)"
    try:
        with open_file(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        yield f"{key} cannot be read as a CSV file: {error}"
        return
    for number, row in enumerate(rows, start=1):
        for cell in row:
            if not _CELL.fullmatch(cell):
                yield f"{key}, line {number}: {cell[:80]!r} is not an action; {remedy}"
    if len(rows) != n_ranks:
        yield (
            f"{key} has {len(rows)} lines, and parallelism.pipeline_parallel_degree is {n_ranks}; {remedy}"
        )


def pipeline_stages(job_config: JobConfig, train_spec: Any, model_args: Any) -> Iterator[str]:
    parallelism, model = job_config.parallelism, job_config.model
    degree = f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}"
    if parallelism.pipeline_parallel_degree == 1:
        return
    if train_spec.pipelining_fn is None:
        yield f"{degree}, but model {model.name!r} has no pipelining_fn; set the degree to 1"
    if train_spec.fact("cuts_by_layers") and hasattr(model_args, "n_layers"):
        yield from problem_in(modules_of_stages, parallelism, model_args.n_layers)


def early_step(optimizer: Optimizer, pp: int, ep: int) -> Iterator[str]:
    if not optimizer.early_step_in_backward:
        return
    yield from clash(
        "optimizer.early_step_in_backward",
        "updates each parameter by itself, with one learning rate, as soon as its gradient is there",
        {
            "optimizer.name": optimizer.name if optimizer.name == "Muon" else None,
            "the number of optimizer.groups": len(getattr(optimizer, "groups", ())),
            "parallelism.pipeline_parallel_degree": pp if pp > 1 else None,
            "parallelism.expert_parallel_degree": ep if ep > 1 else None,
        },
    )


def early_step_with_ddp(job_config: JobConfig, world_size: int) -> Iterator[str]:
    """early_step_in_backward excludes DDP, which reduces gradients only after the hook that uses them."""
    parallelism = job_config.parallelism
    replicas = parallelism.data_parallel_replicate_degree
    has_fsdp = shard_degree(job_config, world_size) * parallelism.context_parallel_degree > 1
    if job_config.optimizer.early_step_in_backward and replicas > 1 and not has_fsdp:
        yield (
            f"optimizer.early_step_in_backward would update with one replica's gradient under DDP, got "
            f"parallelism.data_parallel_replicate_degree = {replicas} with data_parallel_shard_degree * "
            f"context_parallel_degree = 1; set data_parallel_shard_degree = {replicas} and "
            "data_parallel_replicate_degree = 1, or turn it off"
        )
