"""The interface of fault-tolerant training with torchft, which is not available yet."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn as nn

from torchtitan.config.job_config import FaultTolerance

has_torchft: bool = importlib.util.find_spec("torchft") is not None


class FTManager:
    """The torchft manager of a job that doesn't use torchft.

    If the config enables torchft, raises ImportError where it isn't installed, and
    NotImplementedError where it is.
    """

    def __init__(self, ft_config: FaultTolerance) -> None:
        if not ft_config.enable:
            return
        if not has_torchft:
            raise ImportError("fault_tolerance.enable needs torchft: pip install torchft-nightly")
        raise NotImplementedError(
            "Training with torchft is not available yet; set fault_tolerance.enable = false"
        )

    @property
    def enabled(self) -> bool:
        return False

    @property
    def manager(self) -> Any:
        raise AssertionError("there is no torchft manager: torchft is not enabled")

    @property
    def loss_sync_pg(self) -> Any:
        """The process group of replicas, over which losses are averaged; None, as torchft is off."""
        return None

    def get_dp_info(self, dp_degree: int, dp_rank: int) -> tuple[int, int]:
        """Return the data-parallel degree and rank over all replicas."""
        return dp_degree, dp_rank

    def maybe_set_all_reduce_hook(self, model_parts: list[nn.Module]) -> None:
        """Does nothing: with one replica there is nothing to average gradients over."""


def maybe_semi_sync_training(
    ft_config: FaultTolerance,
    ft_manager: FTManager,
    model: nn.Module,
    n_layers: int,
    optimizer: Any,
    fragment_fn: Callable[..., list[nn.Module]] | None = None,
) -> AbstractContextManager:
    """Return a null context. Raises NotImplementedError if the config has a `semi_sync_method`."""
    if ft_config.enable and ft_config.semi_sync_method is not None:
        raise NotImplementedError(
            f"fault_tolerance.semi_sync_method = {ft_config.semi_sync_method!r} is not available "
            "yet; leave it out"
        )
    return nullcontext()
