"""The metrics that a caller's loss_fn returns, reduced over the global batch and equal on every rank."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.step.runner import Runner
from torchtitan.tools import torch_parts

Reductions = Mapping[str, Literal["sum", "max"]]
"""Name of a metric -> how it is reduced over microbatches and ranks."""


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """The result of a step with metrics.

    loss: the loss of the global batch, in fp32 on the device, the same on every rank. metrics: tensors like
        `loss`; a maximum over no microbatch is -inf.
    outputs: loss_fn's third value for each of this rank's microbatches, detached and of whole rows. None
        on pipeline ranks without the last stage; see `TrainingEngine.from_last_stage`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    outputs: list[Any] | None


class StepMetrics:
    """Collects a loss_fn's metrics and outputs per microbatch, and reduces the metrics at the end.

    n_copies: number of ranks with the same metrics. Raises ValueError unless reductions are "sum" or "max".
    """

    def __init__(
        self, reductions: Reductions, runner: Runner, group: dist.ProcessGroup | None, n_copies: int
    ):
        for name, reduction in reductions.items():
            if reduction not in ("sum", "max"):
                raise ValueError(
                    f"metrics[{name!r}] must be 'sum' or 'max', got {reduction!r}; for a mean, "
                    "return its sum and its count as two metrics, and divide them"
                )
        self._runner, self._group, self._n_copies = runner, group, n_copies
        self._sums = [name for name, reduction in reductions.items() if reduction == "sum"]
        self._maxima = [name for name, reduction in reductions.items() if reduction == "max"]
        self._values: dict[str, list[Tensor]] = {name: [] for name in reductions}
        self._outputs: list[tuple[Callable[[Any], Any], Any]] = []

    def take(self, returned: Any, join: Callable[[Any], Any]) -> Any:
        """Keep the metrics and output of a loss_fn, and return its loss. join: see `Microbatch`.

        Raises ValueError unless the metrics are those named in `reductions`.
        """
        loss, metrics, output = returned, {}, None
        if isinstance(returned, tuple) and len(returned) in (2, 3):
            loss, metrics, output = (*returned, None)[:3]
        if metrics.keys() != self._values.keys():
            raise ValueError(
                f"loss_fn returned the metrics {sorted(metrics)}, but metrics= names "
                f"{sorted(self._values)}; return these names for every microbatch, on every rank"
            )
        for name, value in metrics.items():
            # `torch.full` does not wait for the device.
            if not isinstance(value, Tensor):
                value = torch.full((), value, device=self._runner.device)
            if value.numel() != 1:
                raise ValueError(
                    f"loss_fn's metric {name!r} must be one number, got a tensor of shape "
                    f"{list(value.shape)}; reduce it"
                )
            self._values[name].append(value.detach().float().reshape(()))
        output = torch_parts.pytree.tree_map_only(Tensor, Tensor.detach, output)
        self._outputs.append((join, output))
        return loss

    def reduced(self, loss: Tensor) -> StepOutput:
        """Return the global batch's loss and metrics. loss: this rank's share of the loss. Collective."""
        sums, maxima, runner = self._sums, self._maxima, self._runner
        nothing = {name: torch.zeros((), device=runner.device) for name in sums}
        nothing |= {name: torch.full((), -torch.inf, device=runner.device) for name in maxima}
        of_rank = {name: torch.stack([nothing[name], *x]) for name, x in self._values.items()}
        added = [of_rank[name].sum() / self._n_copies for name in sums]
        numbers = torch.stack([loss, *added, *(of_rank[name].max() for name in maxima)])
        if self._group is not None:
            dist.all_reduce(numbers[: 1 + len(sums)], group=self._group)
            dist.all_reduce(numbers[1 + len(sums) :], dist.ReduceOp.MAX, group=self._group)
        if runner.schedule is not None:
            numbers = runner.schedule.broadcast_from_last_stage(numbers)
        found = dict(zip(sums + maxima, numbers[1:], strict=True))
        outputs = [join(output) for join, output in self._outputs]
        metrics = {name: found[name] for name in self._values}
        return StepOutput(numbers[0], metrics, outputs if runner.has_outputs else None)
