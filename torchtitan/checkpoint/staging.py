"""Copies of a run's states in host memory. A save is written from them while training goes on."""

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from torchtitan.distributed.dtensor import local_tensor
from torchtitan.tools import torch_parts


class AsyncMode(StrEnum):
    """The setting `checkpoint.async_mode`: how long training waits for a save."""

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
        leaves = torch_parts.pytree.tree_leaves(self._kept)
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]

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
        return torch_parts.copy_states(state_dict, self._kept, type_check=False)

    def close(self) -> None:
        """Wait for the thread that touches the pages."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def _take_memory(self, state_dict: dict[str, Any]) -> None:
        self._kept = None  # freed first, so that both are never held at once
        self._kept = torch_parts.allocate_states(state_dict)
        self._layout = _layout_of(state_dict)


def _layout_of(state_dict: dict[str, Any]) -> Any:
    leaves, structure = torch_parts.pytree.tree_flatten(state_dict)
    return structure, [
        (leaf.shape, leaf.dtype, getattr(leaf, "placements", None))
        if torch.is_tensor(leaf)
        else None
        for leaf in leaves
    ]
