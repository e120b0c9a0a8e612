"""Copies to and from the device without making the host wait.

The host needs some numbers of a batch to build masks. Reading these from the device would wait for
the device's queue, so a tensor on the device remembers the host tensor that it was copied from.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.tools.torch_parts import version_of
from torchtitan.tools.utils import get_device_type


def pinned(x: Tensor) -> Tensor:
    """Return x in pinned memory, for asynchronous copies to an accelerator; x itself without one."""
    if x.device.type != "cpu" or get_device_type() == "cpu" or x.is_pinned():
        return x
    # torch (2.13) cannot pin a tensor whose elements share memory, such as positions.expand(B, T).
    return x.contiguous().pin_memory()


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on `device`, copied from the host without waiting; `on_host` of the copy returns x."""
    source = pinned(x) if torch.device(device).type == get_device_type() else x
    # A copy to the host must be synchronous, or the caller could read memory before it is written.
    return remember_host(source.to(device, non_blocking=x.device.type == "cpu"), x)


def remember_host(copy: Tensor, source: Tensor) -> Tensor:
    """Return `copy`. If `source` is on the host, `on_host(copy)` returns `source` from now on."""
    # `on_host` compares the tensors' version counters, which inference tensors lack.
    has_versions = not (copy.is_inference() or source.is_inference())
    if source.device.type == "cpu" and copy.device.type != "cpu" and has_versions:
        copy.host_source = source, version_of(source), version_of(copy)
    return copy


def on_host(x: Tensor) -> Tensor:
    """Return the host tensor that x was copied from.

    Returns x itself if that tensor is unknown, or if one of the two was written to after the copy.
    """
    known = getattr(x, "host_source", None)
    if known is None:
        return x
    source, *versions = known
    return source if versions == [version_of(source), version_of(x)] else x


def fetch(x: Tensor) -> Tensor:
    """Return `on_host(x)`, or copy x to the host; later calls return the same copy."""
    known = on_host(x)
    if known.device.type != "cpu":
        known = x.cpu()
        remember_host(x, known)
    return known


def read_later(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor [n] to the host; return a function that waits and returns the values."""
    if tensor.device.type == "cpu":
        numbers = tensor.tolist()
        return lambda: numbers
    # Torch allocates pinned memory for this copy.
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.get_device_module(tensor.device).Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return copy.tolist()

    return read
