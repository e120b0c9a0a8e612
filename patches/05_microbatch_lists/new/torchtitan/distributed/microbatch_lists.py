"""Lists of microbatches that the caller has split, of any number and any shapes."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from torchtitan.config import JobConfig


class ListSchedule:
    """Runs a pipeline's stages on lists of microbatches.

    Torch fixes the number and the shape of microbatches when it makes a schedule. So this makes one
    schedule for each shape in a list, and runs them one after another. Gradients accumulate.

    build: (job_config, stages, loss_fn) -> a schedule, as `build_pipeline_schedule`.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        job_config: JobConfig,
        stages: Sequence[PipelineStage],
        loss_fn: Callable[..., Any],
    ):
        self.build, self.job_config = build, job_config
        self.stages, self.loss_fn = stages, loss_fn

    def step(
        self,
        shapes: list[Any],
        arg_mbs: list[tuple[Any, ...]],
        kwarg_mbs: list[dict[str, Any]],
        target_mbs: list[Tensor] | None,
    ) -> list[Tensor]:
        """Forward and backward of all microbatches; every rank of the pipeline calls it.

        shapes: of every microbatch's input, the same list on all ranks.
        arg_mbs: read on the rank of the first stage. target_mbs: on the rank of the last stage.
        Returns the losses, by shape in the order of first occurrence; none without the last stage.
        """
        losses: list[Tensor] = []
        for shape in dict.fromkeys(shapes):
            chosen = [i for i, other in enumerate(shapes) if other == shape]
            lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
            of_shape: dict[str, Any] = {
                name: None if entries is None else [entries[i] for i in chosen]
                for name, entries in lists.items()
            }
            schedule, stages = self._make_schedule(len(chosen))
            of_shape["losses"] = None if target_mbs is None else []  # torch empties it first
            if "arg_mbs" in inspect.signature(schedule.step).parameters:  # torch 2.14 and later
                schedule.step(**of_shape, return_outputs=False)
            else:
                for stage in stages:  # what torch 2.13's `step` does before this private method
                    stage.has_backward = True
                    stage.clear_runtime_states()
                schedule._step_microbatches(**of_shape, return_outputs=False)
            losses += of_shape["losses"] or []
        return losses

    def _make_schedule(self, n: int) -> tuple[Any, list[PipelineStage]]:
        """Return a schedule of n microbatches, and its stages, which share the modules of ours."""
        stages = [
            PipelineStage(s.submod, s.stage_index, s.num_stages, s.device, group=s.group)
            for s in self.stages
        ]
        parallelism = self.job_config.parallelism
        name = parallelism.pipeline_parallel_schedule
        if name.lower() == "1f1b" and n < stages[0].num_stages:
            name = "GPipe"  # has the same order then; torch's 1F1B pairs its messages differently
        job_config = dataclasses.replace(
            self.job_config,
            training=dataclasses.replace(self.job_config.training, local_batch_size=n),
            parallelism=dataclasses.replace(
                parallelism, pipeline_parallel_schedule=name, pipeline_parallel_microbatch_size=1
            ),
        )
        return self.build(job_config, stages, self.loss_fn), stages


def with_lists(
    schedule: Any,
    build: Callable[..., Any],
    job_config: JobConfig,
    stages: Sequence[PipelineStage],
    loss_fn: Callable[..., Any],
) -> Any:
    """Return the schedule, with a `ListSchedule` of the same stages as its attribute `lists`."""
    schedule.lists = ListSchedule(build, job_config, stages, loss_fn)
    return schedule


def forward_backward_lists(
    trainer: Any, input_dicts: Any, labels: list[Tensor], global_valid_tokens: Tensor | float
) -> Tensor:
    """Do what `forward_backward_step` does for one batch, for a list of microbatches.

    Returns the sum of their losses / global_valid_tokens, detached. Raises ValueError for lists of
    unequal length, or without entries.
    """
    if not isinstance(input_dicts, list) or len(input_dicts) != len(labels) or not labels:
        got = len(input_dicts) if isinstance(input_dicts, list) else type(input_dicts).__name__
        raise ValueError(
            "forward_backward_step needs input_dict and labels as lists of equal length, at least 1, "
            f"got {got} and {len(labels)}; give every microbatch one entry in each"
        )
    if not trainer.parallel_dims.pp_enabled:
        steps = [
            trainer.forward_backward_step(
                input_dict=input_dict, labels=y, global_valid_tokens=global_valid_tokens
            ).detach()
            for input_dict, y in zip(input_dicts, labels, strict=True)
        ]
        return torch.stack(steps).sum()
    arg_mbs: list[tuple[Any, ...]] = []
    kwarg_mbs, target_mbs, shapes = [], [], []
    for input_dict, y in zip(input_dicts, labels, strict=True):
        inputs, y, extra_inputs, extra_kwargs = trainer.post_dataloading_process(input_dict, y)
        first = trainer.pp_has_first_stage
        arg_mbs.append((inputs,) if first else ())
        kwarg_mbs.append(extra_kwargs | (extra_inputs if first else {}))
        target_mbs.append(y)
        shapes.append(tuple(inputs.shape))
    with trainer.train_context():
        losses = trainer.pp_schedule.lists.step(
            shapes, arg_mbs, kwarg_mbs, target_mbs if trainer.pp_has_last_stage else None
        )
    if not losses:
        return torch.tensor([-1.0], device=trainer.device)
    return (torch.stack(losses).sum() / global_valid_tokens).detach().to(trainer.device)
