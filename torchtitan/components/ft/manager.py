"""The torchft interface of torchtitan 0.2.x (fault-tolerant training), which is not supported here."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from torchtitan.config.job_config import FaultTolerance

has_torchft: bool = importlib.util.find_spec("torchft") is not None


class FTManager:
    """Placeholder for torchft's manager in a job without torchft; raises if the config enables torchft."""

    enabled = False
    loss_sync_pg: Any = None

    def __init__(self, ft_config: FaultTolerance) -> None:
        if ft_config.enable and not has_torchft:
            raise ImportError("fault_tolerance.enable needs torchft: pip install torchft-nightly")
        if ft_config.enable:
            raise NotImplementedError(
                "Training with torchft is not available yet; set fault_tolerance.enable = false"
            )

    @property
    def manager(self) -> Any:
        raise AssertionError("there is no torchft manager: torchft is not enabled")

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        return dp_degree, dp_rank

    def maybe_set_all_reduce_hook(self, model_parts: list[nn.Module]) -> None:
        """Do nothing, because a single replica has no gradients to average."""


def maybe_semi_sync_training(
    ft_config: FaultTolerance,
    ft_manager: FTManager,
    model: nn.Module,
    n_layers: int,
    optimizer: Any,
    fragment_fn: Callable[..., list[nn.Module]] | None = None,
) -> AbstractContextManager:
    """Return a null context. Raises as `FTManager` does if the config enables torchft."""
    FTManager(ft_config)
    return nullcontext()
