"""This rank's place in the layout of a job's ranks, before a model exists."""

import dataclasses
import functools
import os
from typing import Any, Self

import torch
import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.config.pipeline_layout import rank_of_last_stage
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.processes.process_group import init_distributed
from torchtitan.job import resolve_job
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import host, utils


@dataclasses.dataclass(frozen=True, eq=False)
class RankLayout:
    """This rank's device, its place in the meshes, and their process groups.

    `TrainingEngine(config, layout=...)` uses these groups. As a context manager it closes itself.
    has_outputs: True on ranks with the last pipeline stage, which have the model's outputs.
    """

    device: torch.device
    parallel_dims: ParallelDims
    has_outputs: bool
    _tenant: object = dataclasses.field(default=None, repr=False)  # see `_Tenant`

    @classmethod
    def join(cls, job_config: JobConfig, train_spec: TrainSpec | None = None) -> Self:
        """Check the config, join or reuse the process group, and find this rank's place. Collective.

        May be called before the model is known. Raises ConfigError for a config that cannot run.
        """
        job_config, train_spec, *_ = resolve_job(job_config, False, train_spec)
        tenant = _Tenant()  # `close` restores the settings that are changed here
        host.move_in(tenant)
        try:
            device = set_device()
            dims = join_ranks(job_config, train_spec, device)
            return cls(device, dims, has_last_stage(job_config, dims), tenant)
        except BaseException:
            host.move_out(tenant)
            raise

    def close(self) -> None:
        """Restore the settings that `join` changed, after all engines are closed. Safe to call twice."""
        host.move_out(self._tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def dp_size(self) -> int:
        """The data-parallel size: how many different batches the ranks read at a time."""
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    @property
    def dp_rank(self) -> int:
        return self._rank_on("batch")

    @functools.cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """The data-parallel group: ranks that read different batches of one step."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh is not None:
            return mesh.get_group()
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)

    @property
    def is_output_source(self) -> bool:
        """True on one rank per batch: last pipeline stage, TP rank 0, CP rank 0."""
        return self.has_outputs and self._rank_on("tp") == 0 and self._rank_on("cp") == 0

    def _rank_on(self, axis: str) -> int:
        mesh = self.parallel_dims.get_optional_mesh(axis)
        return 0 if mesh is None else mesh.get_local_rank()

    def dims_for(self, job_config: JobConfig, train_spec: TrainSpec) -> ParallelDims:
        """Return the meshes; raises ValueError if the config's parallel degrees differ from the layout's."""
        dims = self.parallel_dims
        wanted = parallel_dims_of(job_config, train_spec, self.device, dims.world_size)
        names = [field.name for field in dataclasses.fields(ParallelDims) if field.repr]
        pairs = [(name, getattr(wanted, name), getattr(dims, name)) for name in names]
        if differing := [f"{name} = {a} instead of {b}" for name, a, b in pairs if a != b]:
            raise ValueError(
                f"the config's parallel degrees differ from the layout's: {', '.join(differing)}; make a "
                "RankLayout for this config"
            )
        return self.parallel_dims


class _Tenant:
    """A layout's entry in `tools.host`, which keeps the host's settings changed until `close`."""


def set_device() -> torch.device:
    """Select this rank's device as the current device, and return it."""
    device_type, device_module = utils.get_device_info()
    if device_type == "cpu":
        return torch.device("cpu")
    # Without a launcher, keep the host program's current device.
    index = os.environ.get("LOCAL_RANK")
    index = device_module.current_device() if index is None else int(index)
    if index >= device_module.device_count():
        raise ConfigError(
            f"LOCAL_RANK = {index} needs device {index} (counted from 0), and this machine has "
            f"{device_module.device_count()} devices; start one process for each device"
        )
    host.change(index, device_module.set_device, device_module.current_device)
    return torch.device(device_type, index)


def join_ranks(config: JobConfig, spec: TrainSpec, device: torch.device) -> ParallelDims:
    """Join or reuse the process group and return the layout of ranks.

    Raises ConfigError if the config reserves ranks for generation that are not separated yet.
    """
    if config.ranks_apart and not dist.is_initialized():
        raise ConfigError(
            f"rl.generator.ranks = {config.ranks_apart} reserves ranks for generation, which must be "
            "separated before an engine is built; start with torchtitan.rl.train or rl.controller.build_part, or set it "
            "to 0 for an engine on all ranks"
        )
    world_size = init_distributed(
        config.comm,
        enable_cpu_backend=config.training.enable_cpu_offload,
        base_folder=config.job.dump_folder,
    )
    return parallel_dims_of(config, spec, device, world_size)


def parallel_dims_of(
    config: JobConfig, spec: TrainSpec, device: torch.device, world_size: int
) -> ParallelDims:
    """Return the parallel degrees for this world size; no meshes yet."""
    degrees = config.parallelism
    return ParallelDims(
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree,
        world_size=world_size,
        always_fsdp=is_fsdp_wanted_always(config, spec, device),
    )


def is_fsdp_wanted_always(config: JobConfig, spec: TrainSpec, device: torch.device) -> bool:
    """Return True if FSDP wraps the model even with nothing to shard."""
    degrees = config.parallelism
    if degrees.always_fsdp is not None:
        return degrees.always_fsdp
    if spec.build_dataloader_fn is None:
        return True
    if device.type == "cpu" or degrees.data_parallel_replicate_degree > 1:
        return False
    # The alternative, autocast, keeps an fp32 residual stream and casts all weights in every step.
    return bool(spec.fact("shards_one_rank"))


def has_last_stage(config: JobConfig, dims: ParallelDims) -> bool:
    """Return True if the schedule places the last stage of the model on this rank."""
    pp_mesh = dims.get_optional_mesh("pp")
    if pp_mesh is None:
        return True
    schedule = config.parallelism.pipeline_parallel_schedule
    return pp_mesh.get_local_rank() == rank_of_last_stage(schedule, pp_mesh.size())
