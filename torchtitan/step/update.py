"""From accumulated gradients to new weights: divide, clip, skip what is not finite, step."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.batch.fillers import forget_counts
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.optim.lr_scheduler import LRSchedulersContainer, set_lrs
from torchtitan.optim.optimizer import OptimizersContainer, skipped_where, skips_on_device
from torchtitan.step.losses import StepLosses
from torchtitan.tools import host_copy
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger

MAX_SKIPPED_STEPS_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class OptimStepResult:
    """What one optimizer step did.

    grad_norm: the norm of all gradients before clipping, a tensor on the engine's device.
    lr: the learning rate that the step used.
    skipped: True if the norm was not finite and nothing was updated. On an accelerator the first
        read waits until the device has computed the norm.

    On an accelerator the optimizer leaves everything as it is by itself, and the host learns of it a
    step late: the warning and the error, and a ValueError for a `denominator` whose sum is negative
    or not finite, come with the next `optim_step` before it updates, or with the next `save` or look
    at `weights_version` if that is earlier. Hooks of the optimizers run in skipped steps, too.
    Optimizers other than "fused" have the host wait instead.
    """

    grad_norm: Tensor
    lr: float
    skipped: bool


class _LateOptimStepResult(OptimStepResult):
    """Of a step whose norm the device has looked at, and the host not yet."""

    def __init__(self, grad_norm: Tensor, lr: float, verdict: "_Verdict"):
        self.__dict__.update(grad_norm=grad_norm, lr=lr, _verdict=verdict)

    @property
    def skipped(self) -> bool:
        return self._verdict.skipped


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What the device says of one step's gradients.

    read: returns [1 if the step was skipped, gradient norm, sum of the denominators]; waits until
        the device has computed them.
    describe_losses: returns which microbatches had a bad loss.
    """

    step: int
    read: Callable[[], list[float]]
    describe_losses: Callable[[], str]

    @property
    def skipped(self) -> bool:
        return bool(self.read()[0])


class Update:
    """The optimizer step of a job, and the count of the weights' versions.

    dp_group: the ranks that read different batches; None if there is only one.
    """

    def __init__(
        self,
        job_config: JobConfig,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        parallel_dims: ParallelDims,
        device: torch.device,
        dp_group: torch.distributed.ProcessGroup | None,
    ):
        self.training = job_config.training
        self.steps_in_backward = job_config.optimizer.early_step_in_backward
        self.model_parts = model_parts
        self.optimizers = optimizers
        self.lr_schedulers = lr_schedulers
        self.parallel_dims = parallel_dims
        self.device = device
        self.dp_group = dp_group
        # Offloaded gradients are on the host before the optimizer step: reading them is free.
        self.skips_on_device = (
            device.type != "cpu"
            and not self.training.enable_cpu_offload
            and skips_on_device(optimizers)
        )
        self.losses = StepLosses()
        self._verdict: _Verdict | None = None  # of the last step, until the host has read it
        self._skipped_in_a_row = 0
        self._num_early_steps = 0  # since the last step
        self.had_backward = False  # since the last step, by the engine
        self._version = 0

        def count_version(*_args: object, **_kwargs: object) -> None:
            self._version += 1

        optimizers.register_step_post_hook(count_version)

    # ---- versions of the weights ----

    @property
    def weights_version(self) -> int:
        """Counts changes of the weights. Waits for the verdict on the last step; see `settle`."""
        self.settle()
        return self._version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._version = version

    # ---- before a step ----

    def prepare_early_step(self, n_microbatches: int) -> None:
        """n_microbatches: with fillers, so that data-parallel ranks agree."""
        if self._num_early_steps + n_microbatches > 1:
            raise ValueError(
                "optimizer.early_step_in_backward updates the weights in every backward, so a step "
                f"has one microbatch, got number {self._num_early_steps + n_microbatches} before "
                "optim_step(); give one, or turn it off"
            )
        self._num_early_steps += n_microbatches

    def forget_microbatches(self) -> None:
        """Forget what came since the last step, but for the gradients."""
        self._num_early_steps = 0
        self.had_backward = False
        self.losses.clear()
        # Or the next step would balance experts by tokens whose gradients it never saw.
        forget_counts(self.model_parts)

    def refuse_late_arguments(self, **arguments: object) -> None:
        """Raise ValueError for arguments of a step that was made in backward."""
        given = [name for name, value in arguments.items() if value is not None]
        if given and self.steps_in_backward:
            raise ValueError(
                f"optim_step({given[0]}=...) comes too late with "
                "optimizer.early_step_in_backward, which has updated the weights in backward; "
                "turn it off"
            )

    @staticmethod
    def check_arguments(lr: Tensor | float | None, max_norm: Tensor | float | None) -> None:
        """Raise ValueError for numbers that would make the weights useless.

        Those on an accelerator are not looked at, which would wait for it.
        """
        for name, value, is_kept, rule in (
            ("lr", lr, lambda x: 0 <= x < math.inf, "at least 0 and finite"),
            ("max_norm", max_norm, lambda x: x > 0, "above 0; inf clips nothing"),
        ):
            on_device = isinstance(value, Tensor) and value.device.type != "cpu"
            if value is not None and not on_device and not is_kept(float(value)):
                raise ValueError(f"optim_step's {name} must be {rule}, got {value}; correct it")

    # ---- the step ----

    def step(
        self,
        lr: float | None,
        max_norm: float | None,
        denominator: Tensor | float | None,
        number: Callable[[], int],
        before_update: Callable[[], None],
        advance_schedule: bool = True,
    ) -> OptimStepResult:
        """See `TrainingEngine.optim_step`. number: of this step; asked for once the last is settled.

        before_update: called before the weights change.
        """
        total = None if denominator is None else self._divide_gradients(denominator)
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.training.max_norm if max_norm is None else max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.settle()  # the step before
        self._check_has_gradients(grad_norm)
        skip = self._is_to_skip(grad_norm, total)
        if isinstance(skip, Tensor):
            numbers = [skip, grad_norm, torch.ones_like(grad_norm) if total is None else total]
            numbers = torch.stack([number.double() for number in numbers])
            read, describe_losses = host_copy.read_later(numbers), self.losses.take()
            self._verdict = verdict = _Verdict(number(), read, describe_losses)
        elif skip is not None:
            numbers = [float(skip), grad_norm.item(), 1.0]
            self._verdict = verdict = _Verdict(
                number(), lambda: numbers, lambda: self.losses.take()()
            )
            self.settle()
        before_update()
        if lr is not None:
            lr = float(
                lr
            )  # a tensor would stay in the groups, and be the one the schedule writes to
            for optimizer in self.optimizers:
                set_lrs(optimizer, [lr] * len(optimizer.param_groups))
        # Offloaded gradients have it on the host.
        grad_norm = grad_norm.to(self.device)
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0] if lr is None else lr
        if isinstance(skip, Tensor):
            result = _LateOptimStepResult(grad_norm, lr, verdict)
            forget_counts(self.model_parts, where=skip)
            with skipped_where(self.optimizers, skip):
                self.optimizers.step()
        else:
            result = OptimStepResult(grad_norm, lr, skip is not None and verdict.skipped)
            if result.skipped:
                forget_counts(self.model_parts)
            else:
                self.optimizers.step()
        if advance_schedule:
            self.lr_schedulers.step()
        self.optimizers.zero_grad()
        self._num_early_steps = 0
        self.had_backward = False
        self.losses.clear()
        return result

    def _check_has_gradients(self, grad_norm: Tensor) -> None:
        """Raise ValueError if no rank has a gradient and the engine made no backward pass.

        Lists of microbatches may be empty on all ranks, and updates in backward free the gradients.
        grad_norm: over all ranks, so that all raise. It is read only where this rank has no gradient.
        """
        if self.steps_in_backward or self.had_backward:
            return
        parameters = (p for part in self.model_parts for p in part.parameters())
        if all(p.grad is None for p in parameters) and not grad_norm:
            raise ValueError(
                "optim_step found no gradient on any rank; call forward_backward_step, or backward() "
                "on a loss of your own, before it"
            )

    def _divide_gradients(self, denominator: Tensor | float) -> Tensor | None:
        """Return the sum of the denominators, an fp64 scalar, if only the device has looked at it."""
        total = torch.as_tensor(denominator).detach().reshape(())
        if self.dp_group is not None:
            if total.device.type == "cpu":  # a number is queued with the work, memory is copied
                total = torch.full((), total.item(), dtype=torch.float64, device=self.device)
            total = total.to(self.device, torch.float64, copy=True)
            torch.distributed.all_reduce(total, group=self.dp_group)
            if self.training.gradient_reduction == "mean":
                total /= self.dp_group.size()
        parameters = [p for part in self.model_parts for p in part.parameters()]
        grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        if not self.skips_on_device or total.device.type != self.device.type:
            divisor = total.item()  # known to the host, or waited for
            if not 0 <= divisor < math.inf:
                raise ValueError(_refused_denominator(divisor))
            if grads and divisor > 0:
                torch._foreach_div_(grads, divisor)
            return None
        if grads:
            divisor = total + (total == 0)  # 1 for 0; torch.where would copy the number over
            torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        return total.double()

    def _is_to_skip(self, grad_norm: Tensor, total: Tensor | None) -> Tensor | bool | None:
        """Whether the optimizers must leave everything as it is; where they skip on the device, a bool
        there.

        None if they need not ask. total: what `_divide_gradients` returned.
        """
        skip = None
        # Steps in backward have been made already.
        if not self.steps_in_backward and self.training.nonfinite_grad_norm != "ignore":
            if not self.skips_on_device:
                return not math.isfinite(grad_norm.item())
            skip = ~torch.isfinite(grad_norm)
        if total is not None:
            is_refused = ~(torch.isfinite(total) & (total >= 0))
            skip = is_refused if skip is None else skip | is_refused
        return skip

    def settle(self) -> None:
        """Count, report or raise what the device said of the last step.

        Waits until the device has computed that step's gradient norm, and not for its update.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        skipped, norm, total = verdict.read()
        if not skipped:
            self._skipped_in_a_row = 0
            return
        if self.skips_on_device:
            self._version -= 1  # that the optimizers' hooks have counted
        if not 0 <= total < math.inf:
            raise ValueError(f"step {verdict.step}: {_refused_denominator(total)}")
        self._skipped_in_a_row += 1
        what = f"step {verdict.step}: the gradient norm is {norm}"
        losses = verdict.describe_losses()
        is_too_often = self._skipped_in_a_row > MAX_SKIPPED_STEPS_IN_A_ROW
        if is_too_often or self.training.nonfinite_grad_norm == "stop":
            raise FloatingPointError(
                f"{what}, {self._skipped_in_a_row} time(s) in a row; {losses}; lower optimizer.lr, "
                "look at the data of this step, or set training.nonfinite_grad_norm"
            )
        logger.warning(
            "%s; %s; weights and optimizer state were left as they are",
            what,
            losses,
            extra=event("skipped step", verdict.step),
        )


def _refused_denominator(total: float) -> str:
    return (
        "optim_step's denominator must add up to a finite number, 0 or more, over the "
        f"data-parallel ranks, got {total}"
    )
