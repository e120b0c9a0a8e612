"""Copies to the device and back that the host does not wait for.

The host needs some numbers of a batch to build masks: how many documents, how long the longest.
Reading them off the device would wait for all that is queued there, so a tensor on the device
remembers the host's tensor that it is a copy of.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.tools.utils import get_device_type


def pinned(x: Tensor) -> Tensor:
    """Return x, if there is an accelerator in memory that it reads without the host's help."""
    if x.device.type != "cpu" or get_device_type() == "cpu" or x.is_pinned():
        return x
    return x.pin_memory()


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on `device`, copied from the host without waiting; `on_host` leads back to x."""
    source = pinned(x) if torch.device(device).type == get_device_type() else x
    # A copy to the host must wait: the caller would read what is not there yet.
    return remember_host(source.to(device, non_blocking=x.device.type == "cpu"), x)


def remember_host(copy: Tensor, source: Tensor) -> Tensor:
    """Return `copy`, and let `on_host` lead from it to `source` if that is on the host."""
    is_counted = not (copy.is_inference() or source.is_inference())  # see on_host
    if source.device.type == "cpu" and copy.device.type != "cpu" and is_counted:
        copy._host_source = source, source._version, copy._version
    return copy


def on_host(x: Tensor) -> Tensor:
    """Return the host's tensor that x is a copy of; x if there is none, or either was changed."""
    known = getattr(x, "_host_source", None)
    if known is None:
        return x
    source, *versions = known
    return source if versions == [source._version, x._version] else x


def fetch(x: Tensor) -> Tensor:
    """Return `on_host(x)`, after copying x to the host, once, if there is none."""
    known = on_host(x)
    if known.device.type != "cpu":
        known = x.cpu()
        remember_host(x, known)
    return known


def read_later(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start to copy a tensor [n] to the host, and return a function that gives its numbers.

    That function waits for what was queued before this call, and for nothing queued since.
    """
    if tensor.device.type == "cpu":
        numbers = tensor.tolist()
        return lambda: numbers
    copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.get_device_module(tensor.device).Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return copy.tolist()

    return read
