"""From accumulated gradients to new weights: divide, clip, skip non-finite steps, step, zero."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.batch.dummy_microbatches import forget_counts
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.optim.lr_scheduler import LRSchedulersContainer, set_lrs
from torchtitan.optim.optimizer import OptimizersContainer, skipped_where, skips_on_device
from torchtitan.tools import host_copy, torch_parts
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger, warn_once

MAX_SKIPPED_STEPS_IN_A_ROW = 10
_MAX_ROWS_NAMED = 8


@dataclasses.dataclass
class OptimStepResult:
    """The result of one optimizer step.

    grad_norm: the norm of all gradients before clipping, a tensor on the engine's device.
    lr: the learning rate that the step used.
    skipped: True if the norm was not finite and nothing was updated. On an accelerator the first
        read waits until the device has computed the norm.

    On an accelerator with "fused" optimizers the device itself skips a non-finite update, and the host
    finds out later. The next `optim_step`, `save` or read of `weights_version` then logs the skipped step,
    or raises: FloatingPointError if training has to stop, ValueError if the sum of `denominator` over the
    data-parallel ranks is negative or not finite. The optimizers' hooks also run in skipped steps.
    """

    grad_norm: Tensor
    lr: float
    skipped: bool


class _LateOptimStepResult(OptimStepResult):
    """The result of a step before the host has read whether the device skipped it."""

    def __init__(self, grad_norm: Tensor, lr: float, verdict: "_Verdict"):
        self.grad_norm, self.lr, self._verdict = grad_norm, lr, verdict

    @property
    def skipped(self) -> bool:
        return bool(self._verdict.read()[0])


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """Whether one step was skipped, and why."""

    step: int
    # Returns [1 if the step was skipped, gradient norm, sum of the denominators]; waits for the device.
    read: Callable[[], list[float]]
    # Logs this rank's first non-finite loss.
    log_bad_losses: Callable[[], None]


class StepLosses:
    """The losses of the microbatches since the last optimizer step, kept on the device."""

    def __init__(self) -> None:
        # Bounded, for callers that never call `engine.optim_step`.
        self._calls: deque[tuple[Tensor, Sequence[Tensor | None]]] = deque(maxlen=1024)

    def add(self, losses: Tensor, sample_ids: Sequence[Tensor | None]) -> None:
        """Add losses [n]. sample_ids: for each microbatch [rows, 2], or None; see `documents.SAMPLE_IDS`."""
        self._calls.append((losses.detach().float(), sample_ids))

    def clear(self) -> None:
        self._calls.clear()

    def take(self, step: int) -> Callable[[], None]:
        """Clear the losses; return a function that logs the first non-finite loss with the number `step`."""
        calls, self._calls = self._calls, deque(maxlen=self._calls.maxlen)
        read = host_copy.read_later(torch.cat([losses for losses, _ in calls])) if calls else list
        sample_ids = [ids for _, of_call in calls for ids in of_call]

        def log() -> None:
            losses = read()
            bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
            if not bad:
                return
            first = bad[0]
            ids = sample_ids[first]
            rows = "".join(
                f", row {i} (document{f' {a}' if a == b else f's {a} to {b}'})"
                for i, (a, b) in enumerate([] if ids is None else ids[:_MAX_ROWS_NAMED].tolist(), 1)
                if b >= 0
            )
            rank = dist.get_rank() if dist.is_initialized() else 0
            logger.warning(
                f"step {step}: the first bad loss of rank {rank} is {losses[first]}, in "
                f"microbatch {first + 1} of {len(losses)}{rows}"
            )

        return log


@dataclasses.dataclass
class Update:
    """Makes a job's optimizer steps, and counts the versions of the weights.

    dp_group: the ranks that read different batches. before_update: called before the weights change.
    """

    job_config: dataclasses.InitVar[JobConfig]
    model_parts: list[nn.Module]
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    parallel_dims: ParallelDims
    device: torch.device
    dp_group: dist.ProcessGroup | None
    before_update: Callable[[], None]

    def __post_init__(self, job_config: JobConfig) -> None:
        self.training = job_config.training
        self.steps_in_backward = job_config.optimizer.early_step_in_backward
        # Offloaded gradients are on the host before the optimizer step: reading them is free.
        on_device = self.device.type != "cpu" and not self.training.enable_cpu_offload
        self.skips_on_device = on_device and skips_on_device(self.optimizers)
        self.losses = StepLosses()
        # The verdict on the last step; None once the host has read it.
        self._verdict: _Verdict | None = None
        self._skipped_in_a_row = 0
        # Number of microbatches since the last step.
        self._num_early_steps = 0
        # True if the engine ran a backward since the last step.
        self.had_backward = False
        self._version = 0

        def count_version(*_args: object, **_kwargs: object) -> None:
            self._version += 1

        self.optimizers.register_step_post_hook(count_version)

    # ---- versions of the weights ----

    @property
    def weights_version(self) -> int:
        """The number of weight updates; waits until it is known whether the last step was skipped."""
        self.settle()
        return self._version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._version = version

    # ---- before a step ----

    def prepare_early_step(self, n_microbatches: int) -> None:
        """Call `before_update`: backward will step. ValueError for a second microbatch, even a dummy."""
        if self._num_early_steps + n_microbatches > 1:
            raise ValueError(
                "optimizer.early_step_in_backward updates the weights in every backward, so a step "
                f"has one microbatch, got {self._num_early_steps + n_microbatches} before "
                "optim_step(); give one, or set optimizer.early_step_in_backward = false"
            )
        self._num_early_steps += n_microbatches
        self.before_update()

    def forget_microbatches(self) -> None:
        """Forget everything since the last step except the gradients."""
        self._begin_step()
        # Clear the counts, so that the next step balances experts only by its own microbatches.
        forget_counts(self.model_parts)

    def _begin_step(self) -> None:
        self._num_early_steps = 0
        self.had_backward = False
        self.losses.clear()

    def check_arguments(
        self,
        lr: Tensor | float | None,
        max_norm: Tensor | float | None,
        denominator: Tensor | float | None,
    ) -> None:
        """Raise ValueError for arguments that `optim_step` refuses. Numbers on an accelerator are not read."""
        arguments = {"lr": lr, "max_norm": max_norm, "denominator": denominator}
        given = {name: value for name, value in arguments.items() if value is not None}
        if given and self.steps_in_backward:
            raise ValueError(
                f"optim_step({next(iter(given))}=...) comes too late with optimizer.early_step_in_backward, "
                "which has updated the weights in backward; set optimizer.early_step_in_backward = false"
            )
        for name, is_allowed, rule in (
            ("lr", lambda x: 0 <= x < math.inf, "at least 0 and finite"),
            ("max_norm", lambda x: x > 0, "above 0; inf clips nothing"),
        ):
            value = given.get(name, 1.0)
            on_device = isinstance(value, Tensor) and value.device.type != "cpu"
            if not on_device and not is_allowed(float(value)):
                raise ValueError(f"optim_step's {name} must be {rule}, got {value}; correct it")

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters()]

    # ---- the step ----

    def decide(
        self, number: int, max_norm: float | None, denominator: Tensor | float | None
    ) -> tuple[Tensor, Tensor | bool | None]:
        """Divide and clip the gradients, and decide whether the step is skipped. Call after `settle` for
        the previous step. number: the number of this step, for messages.

        Returns (the gradients' norm before clipping, whether to skip the update). The second is a bool,
        a bool tensor if only the device knows it, or None if every step updates.
        """
        total = None if denominator is None else self._divide_gradients(denominator)
        grad_norm = dist_utils.clip_grad_norm_(
            self._parameters,
            self.training.max_norm if max_norm is None else max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        # If the engine ran a backward, a step without gradients is allowed. Reading the norm waits for the
        # device, so only a rank without gradients reads it. The norm covers all ranks, so all ranks raise.
        is_expected = not (self.steps_in_backward or self.had_backward)
        if is_expected and all(p.grad is None for p in self._parameters) and not grad_norm:
            raise ValueError(
                "optim_step found no gradient on any rank; call forward_backward_step or backward first"
            )
        skip: Tensor | bool | None = None
        # Optimizers that step in backward have updated the weights already.
        if not self.steps_in_backward and self.training.nonfinite_grad_norm != "ignore":
            skip = ~torch.isfinite(grad_norm)
        if total is not None:
            is_refused = ~(torch.isfinite(total) & (total >= 0))
            skip = is_refused if skip is None else skip | is_refused
        if skip is not None:
            numbers = [skip, grad_norm, torch.ones_like(grad_norm) if total is None else total]
            read = host_copy.read_later(torch.stack([x.double() for x in numbers]))
            self._verdict = _Verdict(number, read, self.losses.take(number))
            if not self.skips_on_device:
                skip = bool(read()[0])
        return grad_norm, skip

    def apply(
        self,
        grad_norm: Tensor,
        skip: Tensor | bool | None,
        lr: float | None,
        advance_schedule: bool,
    ) -> OptimStepResult:
        """Update the weights unless the step is skipped, advance the schedule, zero the gradients.

        grad_norm, skip: what `decide` returned.
        """
        self.before_update()
        if lr is not None:
            # Parameter groups must not hold the caller's tensor.
            lr = float(lr)
            for scheduler in self.lr_schedulers.schedulers:
                peak, *_ = scheduler.base_lrs
                factors = [own / peak if peak else 1.0 for own in scheduler.base_lrs]
                set_lrs(scheduler.optimizer, [lr * factor for factor in factors])
        grad_norm = grad_norm.to(self.device)  # the norm of offloaded gradients is on the host
        lrs = self.lr_schedulers.schedulers[0].get_last_lr() if lr is None else [lr]
        lr = lrs[0]
        if not any(lrs):
            warn_once(
                logger,
                "an update with learning rate 0 changes no weight; to begin the warm-up above 0, set "
                "lr_scheduler.step_offset = 0 or an init_lr_factor",
            )
        if isinstance(skip, Tensor):
            forget_counts(self.model_parts, where=skip)
            with skipped_where(self.optimizers, skip):
                self.optimizers.step()
        elif skip:
            forget_counts(self.model_parts)
        else:
            self.optimizers.step()
        if advance_schedule:
            self.lr_schedulers.step()
        self.optimizers.zero_grad()
        self._begin_step()
        if isinstance(skip, Tensor):
            assert self._verdict is not None
            return _LateOptimStepResult(grad_norm, lr, self._verdict)
        return OptimStepResult(grad_norm, lr, bool(skip))

    def _divide_gradients(self, denominator: Tensor | float) -> Tensor | None:
        """Divide the gradients by the denominators' sum over ranks; returns the sum in fp64 if only the
        device can check it.
        """
        total = torch.as_tensor(denominator).detach().reshape(())
        if self.dp_group is not None:
            if total.device.type == "cpu":  # fill on the device: a copy from the host would wait
                total = torch.full((), total.item(), dtype=torch.float64, device=self.device)
            total = total.to(self.device, torch.float64, copy=True)
            dist.all_reduce(total, group=self.dp_group)
            if self.training.gradient_reduction == "mean":
                total /= self.dp_group.size()
        grads = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
        if not self.skips_on_device or total.device.type != self.device.type:
            divisor = total.item()  # waits if the sum is on the device
            if not 0 <= divisor < math.inf:
                raise ValueError(_refused_denominator(divisor))
            if grads and divisor > 0:
                torch_parts.foreach_div(grads, divisor)
            return None
        if grads:
            divisor = total + (total == 0)  # 0 becomes 1; torch.where would copy a 1 from the host
            torch_parts.foreach_div(grads, divisor.to(grads[0].dtype))
        return total.double()

    def settle(self) -> None:
        """If the last step was skipped, log it or raise, the same on all ranks; count skipped steps in a row.

        Waits for the device to compute that step's gradient norm.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        skipped, norm, total = verdict.read()
        if not skipped:
            self._skipped_in_a_row = 0
            return
        if self.skips_on_device:
            self._version -= 1  # `count_version` counted the skipped step, too
        if not 0 <= total < math.inf:
            raise ValueError(f"step {verdict.step}: {_refused_denominator(total)}")
        self._skipped_in_a_row += 1
        verdict.log_bad_losses()
        problem = (
            f"step {verdict.step}: the gradient norm is {norm}, {self._skipped_in_a_row} time(s) in a "
            "row (ranks with a bad loss have logged its microbatch; if there is none, a gradient "
            "overflowed)"
        )
        is_too_often = self._skipped_in_a_row > MAX_SKIPPED_STEPS_IN_A_ROW
        if is_too_often or self.training.nonfinite_grad_norm == "stop":
            raise FloatingPointError(
                f"{problem}; lower optimizer.lr, look at the data of this step, or set "
                "training.nonfinite_grad_norm"
            )
        logger.warning(
            f"{problem}; weights and optimizer state were left as they are",
            extra=event("skipped step", verdict.step),
        )


def _refused_denominator(total: float) -> str:
    return (
        "optim_step's denominator must add up to a finite number, 0 or more, over the "
        f"data-parallel ranks, got {total}"
    )
