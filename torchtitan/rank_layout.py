"""Where this rank stands in a job's layout: known before there is a model."""

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
    """This rank's device and place, and the groups of ranks around it.

    Engines that get one by `TrainingEngine(config, layout=...)` use its groups; without one each
    engine makes its own. `join` may begin before a model, its weights or the number of steps are
    known. As a context manager it closes itself.

    has_outputs: whether outputs of the model arrive here, which is on the last pipeline stage.
    """

    device: torch.device
    parallel_dims: ParallelDims
    has_outputs: bool
    _tenant: "_Tenant | None" = dataclasses.field(default=None, repr=False)

    @classmethod
    def join(cls, job_config: JobConfig, train_spec: TrainSpec | None = None) -> Self:
        """Check the config, join or reuse the process group, and find this rank's place.

        train_spec: in place of the registered one of `model.name`. Collective.
        Raises ConfigError for a config that cannot run.
        """
        train_spec = resolve_job(job_config, False, train_spec)
        # What is changed on the way is on loan until `close`, as an engine's is.
        tenant = _Tenant()
        host.move_in(tenant)
        try:
            device = set_device()
            dims = join_ranks(job_config, train_spec, device)
            return cls(device, dims, has_last_stage(job_config, dims), tenant)
        except BaseException:
            host.move_out(tenant)
            raise

    def close(self) -> None:
        """Give back what `join` has changed, once the engines are closed too. Safe to call twice."""
        host.move_out(self._tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def dp_size(self) -> int:
        """How many groups of ranks read different batches."""
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    @property
    def dp_rank(self) -> int:
        return self._rank_on("batch")

    @functools.cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that read different batches of one step; a group of this rank if it is alone."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh is not None:
            return mesh.get_group()
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)

    @property
    def is_output_source(self) -> bool:
        """True on one of the ranks that share a batch: it has outputs, and tp and cp rank 0."""
        return self.has_outputs and self._rank_on("tp") == 0 and self._rank_on("cp") == 0

    def _rank_on(self, axis: str) -> int:
        mesh = self.parallel_dims.get_optional_mesh(axis)
        return 0 if mesh is None else mesh.get_local_rank()

    def dims_for(self, job_config: JobConfig, train_spec: TrainSpec) -> ParallelDims:
        """Its meshes, for an engine; raises ValueError if the config asks for other ones."""
        wanted = parallel_dims_of(
            job_config, train_spec, self.device, self.parallel_dims.world_size
        )
        differing = [
            f"{name} = {getattr(wanted, name)} for {getattr(self.parallel_dims, name)}"
            for name in (field.name for field in dataclasses.fields(ParallelDims) if field.repr)
            if getattr(wanted, name) != getattr(self.parallel_dims, name)
        ]
        if differing:
            raise ValueError(
                f"the config asks for other degrees than the layout was made with: "
                f"{', '.join(differing)}; make a RankLayout for this config"
            )
        return self.parallel_dims


class _Tenant:
    """Stands for a layout among the engines of the process."""


def set_device() -> torch.device:
    """Return the device of this rank, made the current one."""
    device_type, device_module = utils.get_device_info()
    if device_type == "cpu":
        return torch.device("cpu")
    # Without a launcher, the device that the host program has chosen.
    index = os.environ.get("LOCAL_RANK")
    index = device_module.current_device() if index is None else int(index)
    if index >= device_module.device_count():
        raise ConfigError(
            f"LOCAL_RANK = {index} asks for device {index} of this machine, counted from 0, and "
            f"it shows {device_module.device_count()}; start as many processes on it as it has"
        )
    host.change(index, device_module.set_device, device_module.current_device)
    return torch.device(device_type, index)


def join_ranks(config: JobConfig, spec: TrainSpec, device: torch.device) -> ParallelDims:
    """Join or reuse the process group and return the layout of ranks.

    Raises ConfigError if the config sets ranks apart and nobody has divided them.
    """
    if config.ranks_apart and not dist.is_initialized():
        raise ConfigError(
            f"rl.generator.ranks = {config.ranks_apart} divides the job's ranks before there is an "
            "engine on them; start with torchtitan.rl.train or rl.controller.build_part, or set it "
            "to 0 for an engine by itself"
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
    """The degrees that the config gives so many ranks; no meshes yet."""
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
    """Whether FSDP holds the parameters of a single rank, too."""
    degrees = config.parallelism
    if degrees.always_fsdp is not None:
        return degrees.always_fsdp
    if spec.build_dataloader_fn is None:
        return True
    if device.type == "cpu" or degrees.data_parallel_replicate_degree > 1:
        return False
    # Autocast would keep an fp32 residual stream, and cast all weights in every step. Others'
    # functions may leave one rank's model as it is.
    return getattr(spec.parallelize_fn, "__module__", None) == "torchtitan.models.parallelize"


def has_last_stage(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether this rank holds the end of the model, as the schedule places stages."""
    pp_mesh = dims.get_optional_mesh("pp")
    if pp_mesh is None:
        return True
    schedule = config.parallelism.pipeline_parallel_schedule
    return pp_mesh.get_local_rank() == rank_of_last_stage(schedule, pp_mesh.size())
