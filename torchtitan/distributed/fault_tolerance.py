"""Where fault-tolerant training with torchft would come in. Only "off" is available so far."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn as nn

from torchtitan.config.job_config import FaultTolerance

has_torchft: bool = importlib.util.find_spec("torchft") is not None


class FTManager:
    """Says whether torchft takes part.

    Raises ImportError if it is asked for and not installed, NotImplementedError if it is.
    """

    def __init__(self, ft_config: FaultTolerance) -> None:
        self._manager: Any = None
        if not ft_config.enable:
            return
        if not has_torchft:
            raise ImportError("fault_tolerance.enable needs torchft: pip install torchft-nightly")
        raise NotImplementedError(
            "Training with torchft is not available yet; set fault_tolerance.enable = false"
        )

    @property
    def enabled(self) -> bool:
        return self._manager is not None

    @property
    def manager(self) -> Any:
        assert self._manager is not None, "there is no torchft manager: it is not enabled"
        return self._manager

    @property
    def loss_sync_pg(self) -> Any:
        """The process group over replicas for averaging losses; None when not enabled."""
        return None

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        """Data-parallel degree and rank, counted over all replicas."""
        return dp_degree, dp_rank

    def maybe_set_all_reduce_hook(self, model_parts: list[nn.Module]) -> None:
        """Average gradients over replicas; there is one replica."""


def maybe_semi_sync_training(
    ft_config: FaultTolerance,
    ft_manager: FTManager,
    model: nn.Module,
    n_layers: int,
    optimizer: Any,
    fragment_fn: Callable[..., list[nn.Module]] | None = None,
) -> AbstractContextManager:
    """A context in which replicas synchronise as `semi_sync_method` says; a null one when off."""
    if ft_config.enable and ft_config.semi_sync_method is not None:
        raise NotImplementedError(
            f"fault_tolerance.semi_sync_method = {ft_config.semi_sync_method!r} is not available "
            "yet; leave it out"
        )
    return nullcontext()
