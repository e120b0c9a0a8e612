"""Learning-rate schedule: warm-up, constant, decay."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.config import LRScheduler as LRSchedulerConfig
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger

# decay_type -> factor on the peak learning rate, which falls from 1 to 0 as `progress` goes from 0 to 1.
_DECAY_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


class LRSchedulersContainer:
    """One scheduler per optimizer, all with the same schedule and one saved state."""

    def __init__(self, optimizers: OptimizersContainer, lr_lambda: Callable[[int], float]) -> None:
        assert len(optimizers) > 0, "there must be at least one optimizer to schedule"
        self.schedulers = [LambdaLR(optimizer, lr_lambda) for optimizer in optimizers]

    def __len__(self) -> int:
        return len(self.schedulers)

    def __iter__(self) -> Iterator[LambdaLR]:
        yield from self.schedulers

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    @property
    def last_epoch(self) -> int:
        """The number of steps that the schedule has counted."""
        return self.schedulers[0].last_epoch

    def set_step(self, n: int) -> None:
        """Move the schedule, forward or back, to its state after `n` steps."""
        for scheduler in self.schedulers:
            scheduler.last_epoch = n
            factors = [factor(n) for factor in scheduler.lr_lambdas]
            lrs = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
            set_lrs(scheduler.optimizer, lrs)
            setattr(scheduler, torch_parts.attribute("last_lr"), lrs)

    def state_dict(self) -> dict[str, Any]:
        first, *_ = self.schedulers
        return first.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved schedule. Raises ValueError if the numbers of parameter groups differ."""
        saved, own = len(state_dict["base_lrs"]), len(self.schedulers[0].base_lrs)
        if saved != own:
            raise ValueError(
                f"the saved schedule is for {saved} parameter groups, got {own}: set optimizer.groups "
                "as in the saved run, or exclude optimizer and lr_scheduler from loading"
            )
        for scheduler in self.schedulers:
            own_copy = copy.deepcopy(state_dict)  # `load_state_dict` keeps references
            scheduler.load_state_dict(own_copy)


def follow_own_schedule(lr_schedulers: Any) -> None:
    """Set the optimizers' learning rates by `lr_schedulers`, after a loaded state has changed them."""
    if isinstance(lr_schedulers, LRSchedulersContainer):
        lr_schedulers.set_step(lr_schedulers.last_epoch)


def set_lrs(optimizer: Optimizer, lrs: Iterable[float]) -> None:
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # in place: compiled optimizers keep a reference
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def build_lr_schedulers(
    optimizers: OptimizersContainer,
    lr_scheduler_config: LRSchedulerConfig,
    training_steps: int,
) -> LRSchedulersContainer:
    """Return schedulers for a run of `training_steps` steps.

    Factor on the peak learning rate after e steps, with W warm-up steps, D decay steps that end at
    the schedule's last step T, and p the progress of the decay from 0 to 1:

        w = (e + 1 + step_offset) / W    while it is below 1: init_lr_factor + (1 - init_lr_factor) * w
        1                                until e = T - D
        p = (e + D - T) / D              min_lr_factor + (1 - min_lr_factor) * curve(p)

    With `lr_scheduler.step_offset` = 0 no step has learning rate 0: the first step has 1/W of the
    peak and step W all of it. With -1 the first step has 0/W, as in transformers and verl: "linear",
    "cosine" and the constant schedule (decay_ratio = 0) then equal `get_*_schedule_with_warmup` of
    transformers. The offset does not move the decay.
    """
    config = lr_scheduler_config
    total_steps = training_steps if config.total_steps is None else config.total_steps
    warmup_steps = int(config.warmup_steps)
    if warmup_steps > total_steps:
        logger.warning(
            f"lr_scheduler.warmup_steps is {warmup_steps}, but the schedule has only {total_steps} "
            "steps: the learning rate warms up over all of them"
        )
        warmup_steps = total_steps
    decay_steps = room = total_steps - warmup_steps
    if config.decay_ratio is not None:
        decay_steps = round(total_steps * config.decay_ratio)
    if decay_steps > room:
        logger.warning(
            f"lr_scheduler.decay_ratio gives {decay_steps} decay steps, but {warmup_steps} "
            f"warm-up steps leave only {room} of {total_steps}: the learning rate decays over {room}"
        )
        decay_steps = room
    decay_start = total_steps - decay_steps
    decay_type, floor = config.decay_type, config.min_lr_factor
    # A client's own config class may lack these fields.
    step_offset = getattr(config, "step_offset", 0)
    start = getattr(config, "init_lr_factor", 0.0)

    def factor(epoch: int) -> float:
        """The factor on the peak learning rate after `epoch` steps."""
        warmed_up = epoch + 1 + step_offset
        if warmed_up < warmup_steps:
            return start + (1 - start) * warmed_up / warmup_steps
        if epoch <= decay_start or decay_steps == 0:
            return 1.0
        # Training that goes on past the schedule's end stays at the floor.
        progress = min(1.0, (epoch - decay_start) / decay_steps)
        if decay_type not in _DECAY_CURVES:
            raise ValueError(
                f"lr_scheduler.decay_type must be 'linear', 'sqrt' or 'cosine', got {decay_type!r}"
            )
        return floor + (1 - floor) * _DECAY_CURVES[decay_type](progress)

    return LRSchedulersContainer(optimizers, factor)
