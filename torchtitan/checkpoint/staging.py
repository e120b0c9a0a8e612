"""Copies of a run's states in host memory. A save is written from them while training goes on."""

import importlib
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import StagingOptions
from torch.utils import _pytree as pytree

from torchtitan.distributed.dtensor import local_tensor
from torchtitan.tools.logging import logger


class AsyncMode(StrEnum):
    """How long training waits for a save (see `checkpoint.async_mode`)."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class HostCopies:
    """Copies states into memory that is kept from one save to the next. Used by `AsyncMode.ASYNC`.

    Copying into fresh memory takes five times as long, because the system clears each page at its
    first use. One save at a time may use the copies.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] | None = None
        self._layout: Any = None
        self._touching: threading.Thread | None = None

    def prepare(self, make_states: Callable[[], dict[str, Any]]) -> None:
        """Allocate memory for these states, unless that is done, and touch its pages in a thread.

        Otherwise the first save would take longer than later ones.
        """
        if self._kept is not None:
            return
        self._take_memory(make_states())
        tensors = [leaf for leaf in pytree.tree_leaves(self._kept) if torch.is_tensor(leaf)]

        @torch.no_grad()
        def touch() -> None:
            for tensor in tensors:
                if tensor.dim() > 0:
                    local_tensor(tensor).zero_()

        self._touching = threading.Thread(target=touch, daemon=True)
        self._touching.start()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The states with copies in place of their tensors. The next call overwrites the copies."""
        self.close()
        if self._layout != _layout_of(state_dict):
            self._take_memory(state_dict)
        return _copy_state_dict(state_dict, self._kept, type_check=False)

    def close(self) -> None:
        """Wait for the thread that touches the pages."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def _take_memory(self, state_dict: dict[str, Any]) -> None:
        self._kept = None  # freed first, so that both are never held at once
        self._kept = _create_cpu_state_dict(state_dict)
        self._layout = _layout_of(state_dict)


def _layout_of(state_dict: dict[str, Any]) -> Any:
    leaves, structure = pytree.tree_flatten(state_dict)
    return structure, [
        (leaf.shape, leaf.dtype, getattr(leaf, "placements", None))
        if torch.is_tensor(leaf)
        else None
        for leaf in leaves
    ]


def pinned_stager() -> Any:
    """torch's stager for `AsyncMode.ASYNC_WITH_PINNED_MEM`.

    Returns None, with a warning, if this machine cannot pin memory.
    """
    # Imported from the reference's path, because the reference's tests replace the class there.
    reference = importlib.import_module("torchtitan.components.checkpoint")
    try:
        return reference.DefaultStager(StagingOptions(True, True, True, True))
    except AssertionError as error:  # torch raises it if there is no accelerator
        logger.warning(
            "checkpoint.async_mode is async_with_pinned_mem, but memory cannot be pinned "
            f'here ({error}); saving as with "async"'
        )
        return None


def order_staging_after_compute(stager: Any) -> None:
    """Make the stager's own stream wait for the work that is queued on the current stream."""
    if not torch.accelerator.is_available():
        return
    compute = torch.accelerator.current_stream()
    stream = getattr(stager, "_staging_stream", None)
    if stream is None:  # another version of torch, whose stager has no such attribute
        compute.synchronize()
    else:
        stream.wait_stream(compute)
