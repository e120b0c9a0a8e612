"""Runs one training step of one rank of a job on fake tensors, and counts what it needs."""

import copy
import dataclasses
import itertools
import os
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchtitan import build
from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.config.job_config import Checkpoint, Loss, Parallelism
from torchtitan.distributed import ParallelDims
from torchtitan.engine import TrainingEngine
from torchtitan.estimate.memory_tracker import (
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    MemoryTracker,
)
from torchtitan.estimate.step_counter import StepCounter, StepCounts, combined
from torchtitan.job import resolve_job
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """What one rank needs and does in a step after the first. Memory in bytes.

    parameters: parameter shards and buffers. gradients: all gradients of the rank, after backward.
    activations: the peak of all other memory: activations kept for backward, parameters gathered by
        FSDP, buffers of collectives, temporaries.
    peaks: the peak of the total in each phase of the step; a single kind may peak at another time.
    counts: what the rank sends and computes. host_waits: place -> number of times that the host
        waited for the device there; None if the step ran on real tensors.
    tokens: tokens of the step, over all ranks. model_flops: the model's FLOPs for these tokens, without
        recomputation. bubble: idle time of a pipeline rank divided by its busy time.
    """

    rank: int
    world_size: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    peaks: dict[str, int]
    counts: StepCounts
    host_waits: Counter[str] | None
    num_params: int
    tokens: int
    model_flops: float
    bubble: float

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def as_table(self) -> str:
        phase = max(self.peaks, key=lambda phase: self.peaks[phase])
        rows = {
            PARAMETERS: self.parameters,
            GRADIENTS: self.gradients,
            OPTIMIZER_STATE: self.optimizer_state,
            f"{OTHER}, at most": self.activations,
            f"peak ({phase})": self.peak,
        }
        lines = [f"rank {self.rank} of {self.world_size}:"]
        lines += [f"{name:45} {size / _GIB:9.3f} GiB" for name, size in rows.items()]
        for name, flops in self.counts.flops.items():
            lines.append(f"{name:45} {flops / 1e12:9.3f} TFLOP")
        flops = self.model_flops / self.world_size
        lines.append(f"{'its share of what MFU counts':45} {flops / 1e12:9.3f} TFLOP")
        for (axis, kind), traffic in sorted(self.counts.traffic.items()):
            what = f"{kind} on {axis}, {traffic.calls:.0f} calls, sends"
            lines.append(f"{what:45} {traffic.sent / _GIB:9.3f} GiB")
            if traffic.network:
                lines.append(f"{'  of that out of the node':45} {traffic.network / _GIB:9.3f} GiB")
        if self.host_waits is not None:
            lines.append(f"{'the host waits for the device':45} {self.host_waits.total():9} times")
            lines += [f"  {count} x {what}" for what, count in self.host_waits.most_common()]
        return "\n".join(lines)

    def towards(self, other: "StepEstimate", times: float) -> "StepEstimate":
        """Return self + times * (other - self), for all counted values."""
        same = "rank", "world_size", "tokens", "bubble"
        whole = combined(self, other, 1 - times, times)
        return dataclasses.replace(whole, **{name: getattr(self, name) for name in same})


def estimate_step(
    job_config: JobConfig, rank: int = 0, gpus_per_node: int = 8, n_layers: int | None = None
) -> StepEstimate:
    """Build the job's engine for one rank and count what a step of it allocates and sends."""
    config = _config_to_estimate(job_config)
    is_fake = not config.memory_estimation.disable_fake_mode

    derive_model_args = build.derive_model_args

    def derive_fewer_layers(*args: Any) -> Any:
        model_args = derive_model_args(*args)
        model_args.n_layers = n_layers or model_args.n_layers
        if kinds := getattr(model_args, "layer_types", ()):
            model_args.layer_types = (
                *itertools.islice(itertools.cycle(kinds), model_args.n_layers),
            )
        return model_args

    def join_fake_group(world_size: int, _mode: str) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size)

    with (
        mock.patch(
            "torchtitan.distributed.processes.process_group.init_fake_mode", join_fake_group
        ),
        _rehearsal() if is_fake else _real_device() as rehearsal,
        mock.patch.object(build, "derive_model_args", derive_fewer_layers),
        TrainingEngine(config) as engine,
    ):
        dims = engine.parallel_dims
        if dims.dp_replicate_enabled and not dims.uses_fsdp:
            raise ConfigError(
                "DDP cannot be estimated, because its reducer communicates when it is built; set "
                "parallelism.data_parallel_shard_degree to 2 or more (FSDP, HSDP)"
            )
        # The made-up batch has no token 1.
        engine.tokenizer = types.SimpleNamespace(bos_id=1, eos_id=1)
        logger.info("first step, which makes the optimizer's state")
        for _ in _run_step(engine):
            pass
        logger.info("second step, which is counted")
        if rehearsal is not None:
            _refuse_made_up_sizes(rehearsal)
            rehearsal.forget()
        return _measure_step(engine, rehearsal, gpus_per_node)


def estimate_from_depths(
    job_config: JobConfig, rank: int, gpus_per_node: int, depths: tuple[int, int] | None
) -> StepEstimate:
    """Extrapolate `estimate_step` linearly from two numbers of layers; None: estimate the whole model."""
    if depths is None:
        return estimate_step(job_config, rank, gpus_per_node)
    spec = resolve_job(_config_to_estimate(job_config), builds_data=False).train_spec
    n_layers = spec.model_args[job_config.model.flavor].n_layers
    low, high = (estimate_step(job_config, rank, gpus_per_node, depth) for depth in depths)
    return low.towards(high, (n_layers - depths[0]) / (depths[1] - depths[0]))


def bytes_of_states(job_config: JobConfig) -> int:
    """Return the bytes of the model's parameters, plus gradients and two moments of the trained parameters.

    Counted after the model's conversion. Raises ConfigError for an unknown model.
    """
    config = _config_to_estimate(job_config)
    # Assume FSDP, because it decides how frozen weights are stored.
    config.parallelism = Parallelism(always_fsdp=True)
    spec = resolve_job(config, builds_data=False).train_spec
    args = build.derive_model_args(config, spec)
    dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1, always_fsdp=True)
    model, _ = build.build_on_meta(config, spec, args, dims)
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())


def _run_step(engine: TrainingEngine) -> Iterator[str]:
    """Run one step on a made-up batch; yield the name of each phase at its end."""
    training = engine.job_config.training
    # Pinned, like the data loader's batches.
    tokens = torch.zeros((training.local_batch_size, training.seq_len), dtype=torch.int64)
    if engine.device.type != "cpu":
        tokens = tokens.pin_memory()
    # A model with a value head has no default loss.
    has_values = getattr(engine.model_args, "value_head", False)
    n_run = min(engine.gradient_accumulation_steps, 2)
    for i in range(n_run):
        is_last = i + 1 == n_run
        with nullcontext() if is_last else engine.runner.more_microbatches_follow():
            engine.forward_backward_step(
                input_dict={"input": tokens},
                labels=tokens,
                global_valid_tokens=1.0,
                loss_fn=(lambda values, *_: values.square().sum()) if has_values else None,
            )
        yield "forward and backward"
    engine.optim_step()
    yield "optimizer step"


def _measure_step(engine: TrainingEngine, rehearsal: Any, gpus_per_node: int) -> StepEstimate:
    tracker = MemoryTracker(engine.device.type)
    counter = StepCounter(_axes_of_groups(engine), gpus_per_node)
    parameters = [p for part in engine.model_parts for p in part.parameters()]
    buffers = [b for part in engine.model_parts for b in part.buffers()]
    tracker.mark([*parameters, *buffers], PARAMETERS)
    for state in engine.optimizers.state.values():
        tracker.mark(state.values(), OPTIMIZER_STATE)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: tracker.mark([parameter.grad], GRADIENTS)
            )

    peaks: Counter[str] = Counter()
    most: Counter[str] = Counter()
    total = StepCounts()
    n_microbatches = engine.gradient_accumulation_steps
    with tracker, counter:
        for phase in _run_step(engine):
            peaks[phase] = max(peaks[phase], tracker.peak.total())
            most |= tracker.most  # `|=` keeps the larger value of each kind
            tracker.reset_peak()
            # The first microbatch stands for all but the last.
            is_first = not total.flops
            times = max(1, n_microbatches - 1) if is_first else 1
            total = combined(total, counter.take(), 1, times)
    dims = engine.parallel_dims
    training = engine.job_config.training
    tokens = engine.global_batch_size * training.seq_len
    return StepEstimate(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=dims.world_size,
        parameters=most[PARAMETERS],
        gradients=most[GRADIENTS],
        optimizer_state=most[OPTIMIZER_STATE],
        activations=most[OTHER],
        peaks=peaks,
        counts=total,
        host_waits=None if rehearsal is None else _waits_of(rehearsal),
        num_params=engine.num_params,
        tokens=tokens,
        model_flops=tokens * engine.num_flops_per_token,
        bubble=_bubble(engine),
    )


def _refuse_made_up_sizes(rehearsal: Any) -> None:
    """Raise ConfigError if a tensor's size depends on values on the device, which are made up here."""
    for what in _waits_of(rehearsal):
        if "context_parallel.py" in what and not what.startswith("copy of"):
            raise ConfigError(
                "parallelism.context_parallel_rotate_method = 'allgather' cannot be estimated "
                f"here: sizes depend on values ({what}); set it to 'alltoall'"
            )


def _waits_of(rehearsal: Any) -> Counter[str]:
    """Return the host's waits, except asynchronous copies and waits during which the device stays busy."""
    at_once = {
        what: count
        for what, count in rehearsal.waits.items()
        if ", async" not in what and ", late" not in what
    }
    return Counter(at_once)


def _axes_of_groups(engine: TrainingEngine) -> dict[tuple[str, str], str]:
    """Return the `axis_of_group` of `StepCounter`. Axes with the same ranks may share a group, for example cp and
    fsdp. Then the namespace decides: FSDP and pipelines call "c10d" operators, other axes "_c10d_functional"."""
    meshes = engine.parallel_dims.get_all_one_dimensional_meshes()
    orders = {
        "c10d": ["efsdp", "fsdp", "dp_replicate", "pp", "tp", "cp", "ep", "etp", "batch", "loss"],
        "_c10d_functional": ["tp", "cp", "ep", "etp", "efsdp", "fsdp", "dp_replicate", "pp"],
    }
    return {
        (namespace, meshes[axis].get_group().group_name): axis
        for namespace, order in orders.items()
        for axis in reversed(order)
        if axis in meshes
    }


def _bubble(engine: TrainingEngine) -> float:
    """Return a pipeline's idle time / busy time, (p - 1) / (v m): p ranks, v stages per rank, m microbatches."""
    if engine.pp_schedule is None:
        return 0.0
    config = engine.job_config
    if "ZeroBubble" in config.parallelism.pipeline_parallel_schedule:
        return 0.0
    n = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    return (engine.parallel_dims.pp - 1) / (len(engine.pp_schedule.stages) * n)


@contextmanager
def _real_device() -> Iterator[None]:
    is_stand_in = torch.cuda.is_available() and torch.version.cuda is None
    with mock.patch.object(utils, "device_type", "cpu") if is_stand_in else nullcontext():
        yield


@contextmanager
def _rehearsal() -> Iterator[Any]:
    from torchtitan.estimate.rehearsal import patch_kernels, rehearsing

    with (
        # Restores the function that `patch_kernels` replaces.
        mock.patch.object(F, "scaled_dot_product_attention", F.scaled_dot_product_attention),
        mock.patch.object(F, "rms_norm", _fused_rms_norm),
    ):
        patch_kernels()
        with rehearsing() as rehearsal:
            yield rehearsal


_composed_rms_norm = F.rms_norm


def _fused_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Stand in for the GPU's fused RMSNorm kernel. Without this, torch would build the norm from several
    operators, which save more for the backward."""
    is_fused = weight is None or weight.dtype == x.dtype
    if is_fused and not any(isinstance(t, DTensor) for t in (x, weight)):
        return _FusedRMSNorm.apply(x, weight)
    return _composed_rms_norm(x, normalized_shape, weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """Saves and allocates the same tensors as the fused kernel, without values. x: [..., M]; weight: [M]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        factor = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, factor)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _config_to_estimate(job_config: JobConfig) -> JobConfig:
    """Return a copy of the config that runs without devices, files or tensor values."""
    if job_config.training.enable_cpu_offload:
        raise ConfigError(
            "the memory of training.enable_cpu_offload = true cannot be estimated: what is on the "
            "device depends on timing; set it to false"
        )
    if job_config.activation_checkpoint.mode == "memory_budget":
        raise ConfigError(
            "the memory of activation_checkpoint.mode = 'memory_budget' cannot be estimated: the "
            "compiler decides it; estimate 'none' and 'full', which bound it"
        )
    config = copy.deepcopy(job_config)
    if config.compile.enable:
        logger.info("compile.enable is ignored: compiled blocks need less memory than estimated")
    config.compile.enable = config.parallelism.enable_async_tensor_parallel = False
    config.comm.mode = "fake_backend"
    if config.loss.name:
        logger.info(
            "loss.name = %r is ignored: the memory of its reference or teacher is not counted",
            config.loss.name,
        )
    config.checkpoint, config.loss = Checkpoint(), Loss()
    config.job.save_config_file = None
    # No data or tokenizer is read; these settings pass the checks on any machine.
    config.model.hf_assets_path = os.curdir
    config.training.dataset, config.training.dataset_path = JobConfig().training.dataset, None
    config.validation.enable = False
    config.debug.seed = 0
    # Fake collectives return arbitrary values: create the optimizer's state even if the norm is nan.
    config.training.nonfinite_grad_norm = "ignore"
    return config
