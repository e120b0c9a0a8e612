"""Rules about layouts: how ranks share the work, alone and with what the model is.

See `checks.py`, which goes through all of them.
"""

import csv
import math
import os
import re
from typing import Any

from torchtitan.config.check_helpers import (
    DEGREES,
    ConfigError,
    compile_settings,
    compiles_model,
    data_sections,
    divisors,
    guess,
    has_experts,
    shard_degree,
)
from torchtitan.config.context_layout import sequence_multiple
from torchtitan.config.job_config import JobConfig
from torchtitan.config.pipeline_layout import (
    CSV_SCHEDULES,
    SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    is_one_of,
    modules_of_stages,
)

# --- Ranks ------------------------------------------------------------------------------------


def check_degrees(job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    for name in (*DEGREES, "expert_parallel_degree", "expert_tensor_parallel_degree"):
        degree = getattr(parallelism, name)
        if name == "data_parallel_shard_degree" and degree == -1:
            continue
        if degree < 1:
            remedy = "-1 takes all ranks that are left" if "shard" in name else "1 turns it off"
            raise ConfigError(f"parallelism.{name} must be at least 1, got {degree}; {remedy}")


def check_degrees_match_world_size(job_config: JobConfig, world_size: int) -> None:
    degrees = {name: getattr(job_config.parallelism, name) for name in DEGREES}
    degrees["data_parallel_shard_degree"] = shard_degree(job_config, world_size)
    product = math.prod(degrees.values())
    if product == world_size:
        return

    listed = ", ".join(f"{name} = {degree}" for name, degree in degrees.items())
    others = product // degrees["data_parallel_shard_degree"]
    remedy = f"start {product} processes"
    if world_size % others == 0:
        remedy += f", or set data_parallel_shard_degree = {world_size // others} (or -1)"
    raise ConfigError(
        f"the parallelism degrees must multiply to the number of processes, got {world_size} "
        f"processes and a product of {product}: {listed}; {remedy}"
    )


def check_global_batch_size(job_config: JobConfig, world_size: int) -> None:
    training = job_config.training
    global_batch = training.global_batch_size
    if global_batch == -1:  # as many as the ranks process at once
        return
    replicas = job_config.parallelism.data_parallel_replicate_degree
    dp = replicas * shard_degree(job_config, world_size)
    unit = training.local_batch_size * dp
    if global_batch < 1 or global_batch % unit:
        nearest = max(1, round(global_batch / unit)) * unit
        raise ConfigError(
            f"training.global_batch_size must be a multiple of local_batch_size * data-parallel "
            f"ranks, got {global_batch} with {training.local_batch_size} * {dp}; "
            f"the nearest that fits is {nearest}"
        )
    if job_config.optimizer.early_step_in_backward and global_batch > unit:
        raise ConfigError(
            f"optimizer.early_step_in_backward updates in every backward, so it cannot accumulate "
            f"gradients, got training.global_batch_size = {global_batch} with {unit} sequences per "
            f"microbatch; set global_batch_size to {unit} or turn early_step_in_backward off"
        )


# --- Tensor parallelism -----------------------------------------------------------------------


def check_tensor_parallel_sizes(job_config: JobConfig, train_spec: Any) -> None:
    tp = job_config.parallelism.tensor_parallel_degree
    flavor = job_config.model.flavor
    sizes = _sizes_split_by_tensor_parallel(job_config, train_spec.model_args[flavor])
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree must divide {name} of flavor {flavor!r}, got "
                f"{tp} with {size}; what fits is {divisors(math.gcd(*sizes.values()))}"
            )


def _sizes_split_by_tensor_parallel(job_config: JobConfig, model_args: Any) -> dict[str, int]:
    names = ["n_heads", "n_kv_heads", "vocab_size", "ffn_hidden_dim", "inter_dim"]
    parallelism = job_config.parallelism
    if not has_experts(model_args):
        names += ["hidden_dim"]
    elif parallelism.expert_parallel_degree == 1 or parallelism.expert_tensor_parallel_degree > 1:
        names += ["expert_hidden_dim", "moe_inter_dim"]
    sizes = {name: getattr(model_args, name, None) for name in names}
    return {name: size for name, size in sizes.items() if size}


def check_async_tensor_parallel(job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    if not parallelism.enable_async_tensor_parallel:
        return
    if not compiles_model(job_config):
        raise ConfigError(
            f"parallelism.enable_async_tensor_parallel is carried out by the compiler, got "
            f"{compile_settings(job_config)}; set compile.enable = true with 'model' among its "
            f"components, or turn it off"
        )
    degree = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    if job_config.training.seq_len % degree:
        raise ConfigError(
            f"parallelism.enable_async_tensor_parallel needs a training.seq_len that "
            f"tensor_parallel_degree * context_parallel_degree divides, got "
            f"{job_config.training.seq_len} with {degree}; choose a multiple, or turn it off"
        )


def check_quantized_tensor_parallel(job_config: JobConfig) -> None:
    degree = job_config.parallelism.tensor_parallel_degree
    for name in job_config.model.converters:
        if name.startswith("quantize.grouped_mm.") and degree > 1:
            raise ConfigError(
                f"{name} in model.converters does not work with parallelism.tensor_parallel_degree "
                f"above 1, got {degree}; take it out, or set the degree to 1"
            )
    filters = job_config.quantize.linear.float8.filter_fqns
    if (
        "quantize.linear.float8" in job_config.model.converters
        and degree > 1
        and not any(name in "output" for name in filters)
    ):
        raise ConfigError(
            f"quantize.linear.float8 with parallelism.tensor_parallel_degree above 1 leaves the "
            f"output projection in high precision, got filter_fqns = {filters}; add 'output' to "
            f"quantize.linear.float8.filter_fqns"
        )


# --- Expert parallelism -----------------------------------------------------------------------


def check_num_experts(job_config: JobConfig, train_spec: Any) -> None:
    ep, flavor = job_config.parallelism.expert_parallel_degree, job_config.model.flavor
    model_args = train_spec.model_args[flavor]
    if ep == 1:
        return
    if not has_experts(model_args):
        raise ConfigError(
            f"parallelism.expert_parallel_degree above 1 needs a flavor with experts, got {ep} "
            f"with {job_config.model.name!r} flavor {flavor!r}, which has none; set it to 1"
        )
    num_experts = model_args.moe_args.num_experts
    if num_experts % ep:
        raise ConfigError(
            f"parallelism.expert_parallel_degree must divide the number of experts of flavor "
            f"{flavor!r}, got {ep} with {num_experts} experts; what fits is "
            f"{divisors(num_experts)}"
        )


def check_ranks_for_experts(job_config: JobConfig, world_size: int) -> None:
    """Experts are dealt to ranks that share the other weights, a whole number of times."""
    parallelism = job_config.parallelism
    ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    dp_shard = shard_degree(job_config, world_size)
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    ranks = dp_shard * cp * tp
    if ep > 1 and ranks % (ep * etp):
        raise ConfigError(
            f"parallelism.expert_parallel_degree must divide data_parallel_shard_degree * "
            f"context_parallel_degree * tensor_parallel_degree / expert_tensor_parallel_degree, "
            f"got {ep} with {dp_shard} * {cp} * {tp} / {etp}; what fits is "
            f"{divisors(ranks // etp)}"
        )


def check_expert_tensor_parallel_degree(job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    tp, etp = parallelism.tensor_parallel_degree, parallelism.expert_tensor_parallel_degree
    if parallelism.expert_parallel_degree > 1 and etp not in (1, tp):
        raise ConfigError(
            f"parallelism.expert_tensor_parallel_degree must be 1 or equal "
            f"tensor_parallel_degree, got {etp} with {tp}; set it to {' or '.join(map(str, {1, tp}))}"
        )


def check_reshard_after_forward(job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    policy, policies = parallelism.fsdp_reshard_after_forward, ("default", "always", "never")
    if policy in policies:
        return
    if not str(policy).isdecimal():
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward must be 'default', 'always', 'never' or a "
            f"number of ranks, got {policy!r}{guess(policy, policies)}"
        )
    if parallelism.tensor_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward = {policy} needs whole parameters, but "
            f"tensor_parallel_degree = {parallelism.tensor_parallel_degree} splits them; set the "
            f"former to 'always' or 'never', or the latter to 1"
        )


def check_expert_parallel_comm_backend(job_config: JobConfig) -> None:
    backend = job_config.parallelism.expert_parallel_comm_backend
    if backend != "standard":
        raise ConfigError(
            f"parallelism.expert_parallel_comm_backend must be 'standard', torch's all-to-all, got "
            f"{backend!r}, whose kernels this version does not call; set it to 'standard'"
        )


# --- Context parallelism ----------------------------------------------------------------------


def check_context_parallel(
    job_config: JobConfig, train_spec: Any, builds_data: bool = True
) -> None:
    """An engine pads the rows that it is given; rows of a dataloader have to fit."""
    parallelism, model = job_config.parallelism, job_config.model
    cp = parallelism.context_parallel_degree
    if cp == 1:
        return
    balancer = parallelism.context_parallel_load_balancer
    try:
        multiple = sequence_multiple(balancer, cp)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name in data_sections(job_config) if builds_data else []:
        seq_len = getattr(job_config, name).seq_len
        if seq_len % multiple:
            nearest = max(1, round(seq_len / multiple)) * multiple
            raise ConfigError(
                f"{name}.seq_len must be a multiple of {multiple} for context_parallel_degree = "
                f"{cp} with load balancer {balancer!r}, got {seq_len}; the nearest is {nearest}"
            )
    model_args = train_spec.model_args[model.flavor]
    attn_type = model.attn_type or getattr(model_args, "attn_type", "sdpa")
    if balancer == "ptrr" and attn_type == "sdpa":
        raise ConfigError(
            "parallelism.context_parallel_load_balancer = 'ptrr' balances by the mask, which "
            "model.attn_type = 'sdpa' has not; set the balancer to 'headtail', or the type to "
            "'flex' or 'varlen'"
        )
    heads = getattr(model_args, "n_heads", 0) // parallelism.tensor_parallel_degree
    if parallelism.context_parallel_rotate_method == "alltoall" and heads % cp:
        raise ConfigError(
            f"parallelism.context_parallel_degree must divide the {heads} attention heads of a "
            f"rank for context_parallel_rotate_method = 'alltoall', got {cp}; set the method to "
            "'allgather'"
        )


# --- Pipelines --------------------------------------------------------------------------------


def check_pipeline_schedule(job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return
    name, csv_path = (
        parallelism.pipeline_parallel_schedule,
        parallelism.pipeline_parallel_schedule_csv,
    )
    if not is_one_of(name, SCHEDULES):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule must be one of {', '.join(SCHEDULES)}, got "
            f"{name!r}{guess(name, SCHEDULES)}"
        )
    if is_one_of(name, CSV_SCHEDULES) and not csv_path:
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {name!r} has no order of its own; set "
            f"pipeline_parallel_schedule_csv to a file with one, or choose another schedule"
        )
    if csv_path and not os.path.isfile(csv_path):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule_csv must be a file, got {csv_path!r} (looked "
            f"in {os.getcwd()}); correct the path"
        )
    if csv_path:
        _check_csv(csv_path, parallelism.pipeline_parallel_degree)
    if is_one_of(name, ZERO_BUBBLE_SCHEDULES) and compiles_model(job_config):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {name!r} computes gradients of inputs and "
            f"weights apart, which compiled blocks cannot, got {compile_settings(job_config)}; "
            f"turn compile off for 'model', or take '1F1B' or 'Interleaved1F1B'"
        )
    rows = job_config.training.local_batch_size
    microbatch = parallelism.pipeline_parallel_microbatch_size
    if rows % microbatch:
        fits = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ConfigError(
            f"parallelism.pipeline_parallel_microbatch_size must divide training.local_batch_size, "
            f"got {microbatch} with {rows}; what fits is {fits}"
        )


# <stage><what to do><microbatch>, two of them in parentheses if they overlap, or nothing
_ACTION = r"\d{1,6}[A-Z_]{1,20}(\d{1,9})?"
_CELL = re.compile(rf"\s*({_ACTION}|\({_ACTION};{_ACTION}\)OVERLAP_F_B|)\s*")


def _check_csv(path: str, n_ranks: int) -> None:
    key = "parallelism.pipeline_parallel_schedule_csv"
    remedy = "write a line per pipeline rank, of cells like 0F0, 0B0 (stage, action, microbatch)"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read as a CSV file: {error}") from None
    for number, row in enumerate(rows, start=1):
        for cell in row:
            if not _CELL.fullmatch(cell):
                raise ConfigError(
                    f"{key} = {path!r}, line {number}: {cell[:80]!r} is no action; {remedy}"
                )
    if len(rows) != n_ranks:
        raise ConfigError(
            f"{key} = {path!r} has {len(rows)} lines, and parallelism.pipeline_parallel_degree is "
            f"{n_ranks}; {remedy}"
        )


def check_pipeline_stages(job_config: JobConfig, train_spec: Any) -> None:
    parallelism, model = job_config.parallelism, job_config.model
    if parallelism.pipeline_parallel_degree == 1:
        return
    if train_spec.pipelining_fn is None:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}, but "
            f"model {model.name!r} has no pipelining_fn; set the degree to 1"
        )
    model_args = train_spec.model_args[model.flavor]
    if getattr(model_args, "enable_weight_tying", False):
        raise ConfigError(
            f"flavor {model.flavor!r} of {model.name!r} ties its embedding to its output, which "
            f"are on the first and the last pipeline stage, got "
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}; set "
            f"it to 1"
        )
    # Another pipelining_fn may cut its model otherwise.
    builder = getattr(train_spec.pipelining_fn, "__name__", "")
    if builder == "pipeline_llm" and hasattr(model_args, "n_layers"):
        try:
            modules_of_stages(parallelism, model_args.n_layers)
        except ValueError as error:
            raise ConfigError(str(error)) from None


# --- Optimizer steps in backward --------------------------------------------------------------


def check_early_step_in_backward(job_config: JobConfig) -> None:
    if not job_config.optimizer.early_step_in_backward:
        return
    for degree in ("pipeline_parallel_degree", "expert_parallel_degree"):
        value = getattr(job_config.parallelism, degree)
        if value > 1:
            raise ConfigError(
                f"optimizer.early_step_in_backward does not work with parallelism.{degree} above "
                f"1, got {value}; turn one of the two off"
            )


def check_early_step_with_ddp(job_config: JobConfig, world_size: int) -> None:
    """DDP reduces a gradient after the hook that would have stepped with it."""
    parallelism = job_config.parallelism
    replicas = parallelism.data_parallel_replicate_degree
    has_fsdp = shard_degree(job_config, world_size) * parallelism.context_parallel_degree > 1
    if job_config.optimizer.early_step_in_backward and replicas > 1 and not has_fsdp:
        raise ConfigError(
            f"optimizer.early_step_in_backward would update with the gradient of one replica alone "
            f"under DDP, got parallelism.data_parallel_replicate_degree = {replicas} with "
            f"data_parallel_shard_degree * context_parallel_degree = 1; set "
            f"data_parallel_shard_degree = {replicas} and data_parallel_replicate_degree = 1, "
            f"whatever tensor_parallel_degree is, or turn early_step_in_backward off"
        )
