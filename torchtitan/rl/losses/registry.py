"""Losses by their names in `rl.loss.name`."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from torchtitan.rl.losses.base import PolicyLoss
from torchtitan.rl.losses.policy import (
    CISPOLoss,
    CrossEntropyLoss,
    DAPOLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
)

if TYPE_CHECKING:
    from torchtitan.rl.job_config import RLLoss

_LOSSES: dict[str, type[PolicyLoss]] = {
    "grpo": GRPOLoss,
    "dapo": DAPOLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "cross_entropy": CrossEntropyLoss,
}
_LossClass = TypeVar("_LossClass", bound=type[PolicyLoss])


def register_loss(name: str) -> Callable[[_LossClass], _LossClass]:
    """Decorator that makes a `PolicyLoss` dataclass known as `rl.loss.name`.

    Raises ValueError if the name is taken.
    """

    def register(loss_cls: _LossClass) -> _LossClass:
        if _LOSSES.setdefault(name, loss_cls) is not loss_cls:
            raise ValueError(f"the loss {name!r} is registered already; choose another name")
        return loss_cls

    return register


def loss_names() -> list[str]:
    """All registered names."""
    return list(_LOSSES)


def loss_class(name: str) -> type[PolicyLoss]:
    """The class of a name; raises ValueError for an unknown one."""
    if name not in _LOSSES:
        raise ValueError(f"rl.loss.name must be one of {', '.join(_LOSSES)}, got {name!r}")
    return _LOSSES[name]


def build_loss(name: str, **settings: Any) -> PolicyLoss:
    """The loss of that name; settings it has no field for raise ValueError, None is left out."""
    loss_cls = loss_class(name)
    known = {field.name for field in fields(loss_cls)}
    given = {key: value for key, value in settings.items() if value is not None}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"rl.loss.{unknown[0]} is not read by rl.loss.name = {name!r}, which reads "
            f"{', '.join(sorted(known))}, got {given[unknown[0]]}; take it out"
        )
    return loss_cls(**given)


def loss_from_config(config: "RLLoss") -> PolicyLoss:
    """The loss that the section `[rl.loss]` describes; the batcher reads agg_mode and norm."""
    settings = {k: v for k, v in vars(config).items() if k not in ("name", "agg_mode", "norm")}
    return build_loss(config.name, **settings)
