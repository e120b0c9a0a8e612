"""The process groups that engines make, apart from the host's, and how to abort their collectives.

A collective that waits for a rank that has failed elsewhere can only be aborted together with its
group. The host's default group is not ours to abort, so engines don't communicate over it in steps.
"""

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_meshes
import torch.distributed.distributed_c10d as c10d

from torchtitan.distributed.dtensor import load_dtensor

_our_default: "weakref.ref[dist.ProcessGroup] | None" = None

# Where this process listens for the connections of a group's other ranks.
_addresses: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple]]" = weakref.WeakKeyDictionary()


def group_is_ours() -> bool:
    """Whether the default process group was made by `init_distributed`, not by the host."""
    return _our_default is not None and _our_default() is dist.group.WORLD is not None


def claim_default_group() -> None:
    """Remember that the default process group is ours."""
    global _our_default
    _our_default = weakref.ref(dist.group.WORLD)


@contextlib.contextmanager
def making_groups() -> Iterator[None]:
    """Groups that are made inside can be given to `abort_groups`."""
    groups, addresses = set(c10d._world.pg_map), _listening_addresses()
    yield
    made = _listening_addresses() - addresses
    for group in set(c10d._world.pg_map) - groups:
        _addresses[group] = made


@contextlib.contextmanager
def making_meshes() -> Iterator[None]:
    """`making_groups`, for meshes: an axis of all ranks does not get the host's default group."""
    default = dist.group.WORLD
    is_hosts = default is not None and not group_is_ours()
    with making_groups():
        if not is_hosts or default.size() == 1 or dist.get_backend() == "fake":
            yield
            return
        own = dist.new_group(group_desc="torchtitan")
        get_default, torch_meshes._get_default_group = torch_meshes._get_default_group, lambda: own
        try:
            yield
        finally:
            torch_meshes._get_default_group = get_default


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Have collectives of these groups fail on this rank, those under way too.

    May be called from another thread. Give only groups that were made inside `making_groups`.
    """
    groups = [group for group in groups if group in c10d._world.pg_map]
    # gloo has no abort. It fails on all ranks when the ranks close the connections between them, of
    # which each was accepted by one of the two ranks.
    addresses = {address for group in groups for address in _addresses.get(group, ())}
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            if _address_of(connection) in addresses and not _listens(connection):
                connection.shutdown(socket.SHUT_RDWR)
    if not torch.accelerator.is_available():
        return
    backends = []
    for group in groups:
        with contextlib.suppress(RuntimeError):  # it has none for this kind of device
            backends.append(group._get_backend(torch.accelerator.current_accelerator()))
    # Together, as torch's own abort of all groups does: one communicator could wait for another.
    together = next((x for x in backends if hasattr(x, "_group_start")), None)
    if together is not None:
        together._group_start()
    for backend in backends:
        if backend.name() not in ("gloo", "fake"):
            backend.abort()
    if together is not None:
        together._group_end()


def forget_meshes() -> None:
    """Call this once groups are gone, or engines with meshes that look alike would still use them.

    DTensor remembers results, with their meshes, and takes meshes of equal layouts for the same.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError):  # a torch with other caches
        # As tensor.debug's function does, whose import takes a fifth of a second.
        dispatcher = load_dtensor().DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        load_dtensor("._redistribute")._gen_transform_infos.cache_clear()


# ---- this process's connections ----


def _connections() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket, for the caller to close; none on systems without /proc."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(number))
            else:
                continue
        except OSError:  # closed meanwhile
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            yield connection
        else:
            connection.close()


def _listening_addresses() -> set[tuple]:
    addresses = set()
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            if _listens(connection):
                addresses.add(_address_of(connection))
    return addresses


def _address_of(connection: socket.socket) -> tuple:
    return connection.getsockname()[:2]


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
