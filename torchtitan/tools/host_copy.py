"""Copies to the device and back that the host does not wait for.

Masks need numbers of a batch on the host: how many documents, how long the longest. Batches come
from there. Reading the numbers off the device instead would stop the host until the device has
done all that was queued, so a tensor on the device remembers which one of the host it is a copy of.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.tools.utils import get_device_type


def pinned(x: Tensor) -> Tensor:
    """x [any], in memory that an accelerator reads without the host's help where there is one."""
    if x.device.type != "cpu" or get_device_type() == "cpu" or x.is_pinned():
        return x
    return x.pin_memory()


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on `device`, copied from the host without waiting; `on_host` leads back to x."""
    is_accelerator = torch.device(device).type == get_device_type()
    source = pinned(x) if is_accelerator else x
    # To the host nothing may be asynchronous: the caller would read what is not there yet.
    return remember_host(source.to(device, non_blocking=x.device.type == "cpu"), x)


def remember_host(copy: Tensor, source: Tensor) -> Tensor:
    """Return `copy`, which `on_host` leads from to `source` if that is on the host."""
    is_counted = not (copy.is_inference() or source.is_inference())  # see on_host
    if source.device.type == "cpu" and copy.device.type != "cpu" and is_counted:
        copy._host_source = source, source._version, copy._version
    return copy


def on_host(x: Tensor) -> Tensor:
    """Return the host's tensor that x is a copy of; x itself if there is none, or one changed."""
    known = getattr(x, "_host_source", None)
    if known is None:
        return x
    source, *versions = known
    return source if versions == [source._version, x._version] else x


def fetch(x: Tensor) -> Tensor:
    """Return `on_host(x)`, after a copy to the host, the one wait for x, where there is none."""
    known = on_host(x)
    if known.device.type != "cpu":
        known = x.cpu()
        remember_host(x, known)
    return known


def read_later(tensor: Tensor) -> Callable[[], list[Any]]:
    """Start to copy a tensor [n] to the host; call what is returned to get its numbers.

    The call waits for what was queued before this function, and for nothing queued since.
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
