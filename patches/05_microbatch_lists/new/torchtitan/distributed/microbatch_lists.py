"""Lists of microbatches that the caller has split, of any number and any shapes."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


@dataclasses.dataclass
class ListSchedule:
    """Runs a pipeline's stages on lists of microbatches.

    Torch fixes the number and the shape of microbatches when it makes a schedule, so this makes one for
    each shape in a list. They run one after another, and gradients accumulate.
    """

    build: Callable[..., Any]  # build_pipeline_schedule, of this config, stages and loss
    job_config: Any
    stages: Sequence[PipelineStage]
    loss_fn: Callable[..., Any]

    def step(
        self,
        shapes: list[Any],
        arg_mbs: list[tuple[Any, ...]],
        kwarg_mbs: list[dict[str, Any]],
        target_mbs: list[Tensor] | None,
    ) -> list[Tensor]:
        """Forward and backward of all microbatches; every rank of the pipeline calls it.

        shapes: of every microbatch's input, the same list on all ranks.
        arg_mbs, target_mbs: used on the ranks of the first and of the last stage.
        Returns the losses, by shape in the order of first occurrence; none without the last stage.
        """
        losses: list[Tensor] = []
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        for shape in dict.fromkeys(shapes):
            of_shape: dict[str, Any] = {
                name: entries
                and [x for x, own in zip(entries, shapes, strict=True) if own == shape]
                for name, entries in lists.items()
            }
            of_shape["losses"] = None if target_mbs is None else []  # torch empties it first
            schedule, stages = self._make_schedule(shapes.count(shape))
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
        training, parallelism = self.job_config.training, self.job_config.parallelism
        name = parallelism.pipeline_parallel_schedule
        if name.lower() == "1f1b" and n < stages[0].num_stages:
            name = "GPipe"  # has the same order then; torch's 1F1B pairs its messages differently
        job_config = dataclasses.replace(
            self.job_config,
            training=dataclasses.replace(training, local_batch_size=n),
            parallelism=dataclasses.replace(
                parallelism, pipeline_parallel_schedule=name, pipeline_parallel_microbatch_size=1
            ),
        )
        return self.build(job_config, stages, self.loss_fn), stages


def with_lists(schedule: Any, *args: Any) -> Any:
    """Return the schedule, with a `ListSchedule(*args)` as its attribute `lists`."""
    schedule.lists = ListSchedule(*args)
    return schedule


def forward_backward_lists(
    trainer: Any, input_dicts: Any, labels: list[Tensor], global_valid_tokens: Tensor | float
) -> Tensor:
    """Do what `forward_backward_step` does, for a list of microbatches; return their summed loss.

    Raises ValueError for lists of unequal length, or without entries.
    """
    n = len(input_dicts) if isinstance(input_dicts, list) else 0
    if n != len(labels) or n == 0:
        raise ValueError(
            "forward_backward_step needs input_dict and labels as lists of equal length, at least 1, "
            f"got {n} and {len(labels)}; give every microbatch one entry in each"
        )
    batches = list(zip(input_dicts, labels, strict=True))
    if not trainer.parallel_dims.pp_enabled:
        losses = [
            trainer.forward_backward_step(
                input_dict=input_dict, labels=y, global_valid_tokens=global_valid_tokens
            ).detach()
            for input_dict, y in batches
        ]
        return torch.stack(losses).sum()
    is_first, is_last = trainer.pp_has_first_stage, trainer.pp_has_last_stage
    ready = [trainer.post_dataloading_process(*batch) for batch in batches]
    with trainer.train_context():
        losses = trainer.pp_schedule.lists.step(
            [tuple(inputs.shape) for inputs, *_ in ready],
            [(inputs,) if is_first else () for inputs, *_ in ready],
            [kwargs | (extra if is_first else {}) for _, _, extra, kwargs in ready],
            [y for _, y, *_ in ready] if is_last else None,
        )
    if not is_last:
        return torch.tensor([-1.0], device=trainer.device)
    return (torch.stack(losses).sum() / global_valid_tokens).detach().to(trainer.device)
