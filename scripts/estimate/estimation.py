"""Memory that a training job needs on each device, without the devices and without running it.

    NGPU=8 python -m scripts.estimate.estimation --job.config_file X.toml [config overrides]

See docs/estimate.md for what the figures mean.
"""

import copy
import dataclasses
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from scripts.estimate._memory_tracker import (
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    MemoryTracker,
)
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.config.manager import exit_on_config_error
from torchtitan.distributed import ParallelDims
from torchtitan.engine import TrainingEngine
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.decoder import Decoder
from torchtitan.tools.logging import logger

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, in a step after the first.

    parameters: shards of parameters, and buffers. gradients: all of them, after backward.
    activations: the largest sum of everything else, whenever that was: activations kept for
        backward, parameters gathered by FSDP, buffers of collectives, temporaries.
    peak: the largest sum of all; not all kinds are at their largest then. peak_phase says when.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    peak: int
    peak_phase: str
    world_size: int

    def as_table(self) -> str:
        rows = {
            PARAMETERS: self.parameters,
            GRADIENTS: self.gradients,
            OPTIMIZER_STATE: self.optimizer_state,
            f"{OTHER}, at most": self.activations,
            f"peak ({self.peak_phase})": self.peak,
        }
        lines = [f"{name:45} {size / _GIB:9.3f} GiB" for name, size in rows.items()]
        return "\n".join([f"each of {self.world_size} rank(s):", *lines])


class _EstimationEngine(TrainingEngine):
    """The engine of a job on rank 0 of ranks that don't exist, with tensors made in `mode`."""

    def __init__(self, job_config: JobConfig, mode: Any) -> None:
        self.mode = mode
        super().__init__(job_config)

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        # Now, since it reads the values of tensors, which fake ones don't have.
        parallel_dims.build_mesh()
        return parallel_dims

    def _build_meta_model(self) -> nn.Module:
        model = super()._build_meta_model()
        # Masks of an invented batch: kernels ask for some, and `_FusedAttention` reads none. A
        # model of somebody else's is run as it is.
        self.masks: dict[str, Any] = {}
        if isinstance(model, Decoder):
            row = torch.zeros((1, self.job_config.training.seq_len), dtype=torch.int64)
            self.masks["attention_masks"] = model.build_causal_masks(row)
            for module in model.modules():
                if hasattr(module, "inner_attention"):
                    module.inner_attention = _FusedAttention()
        return model

    def _materialize(self) -> None:
        with self.mode:
            for part in self.model_parts:
                part.to_empty(device=self.device)
                part.train()

    def run_step(self) -> Iterator[str]:
        """One step on an invented batch; yields the name of each phase when it has ended."""
        training = self.job_config.training
        shape = (training.local_batch_size, training.seq_len)
        # A second microbatch finds the gradients of the first; a third changes nothing more.
        for _ in range(min(self.gradient_accumulation_steps, 2)):
            tokens = torch.zeros(shape, dtype=torch.int64)
            self.forward_backward_step(
                input_dict={"input": tokens, **self.masks},
                labels=tokens,
                global_valid_tokens=1.0,
            )
        yield "forward and backward"
        self.optim_step()
        yield "optimizer step"

    def parameters_and_buffers(self) -> Iterator[Tensor]:
        for part in self.model_parts:
            yield from part.parameters()
            yield from part.buffers()


class _FusedAttention(FlexAttentionWrapper):
    """Takes the memory of a fused kernel, whichever the job uses: no scores, only their sums.

    The kernels of an accelerator (flash, flex, varlen) all keep q, k, v, the output and one
    number per row of scores. What documents the batch has changes time, not memory.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: Any = None,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q: [B, H, T, D]; k: [B, K, T, D]; v: [B, K, T, Dv]. Returns [B, H, T, Dv]."""
        width = v.shape[-1]
        if width != q.shape[-1]:  # kernels for one head size get zeros appended
            v = F.pad(v, (0, q.shape[-1] - width))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
        out = out[..., :width]
        return (out, q.new_empty(q.shape[:-1], dtype=torch.float32)) if return_lse else out


def estimate_memory(job_config: JobConfig) -> MemoryEstimate:
    """Build the job's engine on fake tensors and count the bytes of one step of rank 0.

    As many ranks as the environment variable NGPU says; the process group is a fake one and
    stays. With memory_estimation.disable_fake_mode the step is computed for real, with the
    memory of one rank.

    Raises ConfigError for a config that cannot run, or whose memory cannot be estimated.
    """
    config = _config_to_estimate(job_config)
    is_fake = not config.memory_estimation.disable_fake_mode
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext()
    engine = _EstimationEngine(config, mode)
    with mode:
        logger.info("first step, which makes the optimizer's state")
        # Not tracked: DTensor works out the placements of each operator on its first call, on
        # tensors of the global shape, which no rank ever has.
        for _ in engine.run_step():
            pass
        logger.info("second step, whose memory is counted")
        return _measure_step(engine)


def _measure_step(engine: _EstimationEngine) -> MemoryEstimate:
    tracker = MemoryTracker()
    parameters = list(engine.parameters_and_buffers())
    tracker.mark(parameters, PARAMETERS)
    for state in engine.optimizers.state.values():
        tracker.mark(state.values(), OPTIMIZER_STATE)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: tracker.mark([parameter.grad], GRADIENTS)
            )

    peak, peak_phase = 0, ""
    most: Counter[str] = Counter()
    with tracker:
        for phase in engine.run_step():
            if tracker.peak.total() > peak:
                peak, peak_phase = tracker.peak.total(), phase
            most |= tracker.most  # the larger one of each
            tracker.reset_peak()
    return MemoryEstimate(
        parameters=most[PARAMETERS],
        gradients=most[GRADIENTS],
        optimizer_state=most[OPTIMIZER_STATE],
        activations=most[OTHER],
        peak=peak,
        peak_phase=peak_phase,
        world_size=engine.parallel_dims.world_size,
    )


def _config_to_estimate(job_config: JobConfig) -> JobConfig:
    """Copy of the config that asks for no devices, files or values of tensors."""
    if job_config.training.enable_cpu_offload:
        raise ConfigError(
            "the memory of training.enable_cpu_offload = true cannot be estimated: what is on the "
            "device depends on timing; set it to false"
        )
    if job_config.activation_checkpoint.mode == "memory_budget":
        raise ConfigError(
            "the memory of activation_checkpoint.mode = 'memory_budget' cannot be estimated: the "
            "compiler decides it; estimate 'none' and 'full', which it lies between"
        )
    for name in ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        degree = getattr(job_config.parallelism, name)
        if degree > 1:
            raise ConfigError(
                f"the memory of parallelism.{name} above 1 cannot be estimated, got {degree}, only "
                f"that of data and tensor parallelism; set it to 1"
            )
    config = copy.deepcopy(job_config)
    if config.compile.enable:
        logger.info("compile.enable is left out: compiled blocks keep less than this estimate")
    config.compile.enable = config.parallelism.enable_async_tensor_parallel = False
    config.comm.mode = "fake_backend"
    config.checkpoint.enable = config.checkpoint.create_seed_checkpoint = False
    config.job.save_config_file = None
    # No data is read and no tokenizer loaded; these pass the checks on any machine.
    config.model.hf_assets_path = os.curdir
    config.training.dataset, config.training.dataset_path = JobConfig().training.dataset, None
    config.validation.enable = False
    # Both read a value otherwise, which fake tensors don't have.
    config.debug.seed = 0
    config.training.nonfinite_grad_norm = "ignore"
    return config


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    os.environ.setdefault("NGPU", os.environ.get("WORLD_SIZE", ""))
    with exit_on_config_error():
        started = time.monotonic()
        estimate = estimate_memory(ConfigManager().parse_args())
    print(estimate.as_table())
    logger.info("estimated in %.0f s", time.monotonic() - started)


if __name__ == "__main__":
    main()
