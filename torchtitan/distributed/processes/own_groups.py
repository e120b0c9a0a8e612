"""Engines' process groups, separate from the host program's, and how to abort an engine's collectives.

If a rank has failed, a collective that waits for it ends only if its whole group is aborted. The
host's default group is not ours to abort, so steps don't communicate over it.
"""

import contextlib
import os
import socket
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from torchtitan.distributed.dtensor import load_dtensor
from torchtitan.tools import torch_parts

_our_default: "weakref.ref[dist.ProcessGroup] | None" = None

# Per group, the addresses at which this process listens for the group's other ranks.
_addresses: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple]]" = weakref.WeakKeyDictionary()


def group_is_ours() -> bool:
    """Return True if `init_distributed`, and not the host program, made the default process group."""
    return _our_default is not None and _our_default() is dist.group.WORLD is not None


def claim_default_group() -> None:
    global _our_default
    _our_default = weakref.ref(dist.group.WORLD)


@contextlib.contextmanager
def making_groups() -> Iterator[None]:
    """A context that records the groups made in it, so that `abort_groups` can abort them."""
    groups, addresses = set(torch_parts.world.pg_map), _listening_addresses()
    yield
    made = _listening_addresses() - addresses
    for group in set(torch_parts.world.pg_map) - groups:
        _addresses[group] = made


@contextlib.contextmanager
def making_meshes() -> Iterator[None]:
    """`making_groups` for meshes. For an axis of all ranks, torch (2.13) would use the default group. If
    the host made the default group, the axis gets a new group instead.
    """
    with making_groups(), contextlib.ExitStack() as stack:
        is_hosts = dist.is_initialized() and not group_is_ours()
        if is_hosts and dist.get_world_size() > 1 and dist.get_backend() != "fake":
            own = dist.new_group(group_desc="torchtitan")
            stack.enter_context(torch_parts.replaced("mesh_default_group", lambda: own))
        yield


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Make collectives of these groups fail on this rank, including any in progress.

    groups: made inside `making_groups`. May be called from any thread.
    """
    groups = [group for group in groups if group in torch_parts.world.pg_map]
    # gloo's own `abort` changes nothing (torch 2.13 to 2.15), so shut down its connections. For each
    # connection one of the two ranks listened, and on that rank `_addresses` has the connection's address.
    addresses = {address for group in groups for address in _addresses.get(group, ())}
    for connection, address, listens in _tcp_sockets():
        if address in addresses and not listens:
            # The connection may have ended.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    if not torch.accelerator.is_available():
        return
    backends = []
    for group in groups:
        with contextlib.suppress(RuntimeError):  # the group has no backend for this device
            backends.append(torch_parts.backend_of(group, torch.accelerator.current_accelerator()))
    # Abort them as one batch, as torch's own function does: a communicator could wait for another.
    together = next((x for x in backends if torch_parts.field_of(x, "start_abort")), None)
    if together is not None:
        torch_parts.field_of(together, "start_abort")()
    for backend in backends:
        if backend.name() not in ("gloo", "fake"):
            backend.abort()
    if together is not None:
        torch_parts.field_of(together, "end_abort")()


def forget_meshes() -> None:
    """Clear DTensor's caches, which would give the next engine's meshes the groups of this engine."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    with contextlib.suppress(AttributeError, TypeError):  # this torch version has other caches
        dispatcher = torch_parts.dispatcher(load_dtensor().DTensor)
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch_parts.clear_sharding_cache()
        torch_parts.transforms.cache_clear()


def _listening_addresses() -> set[tuple]:
    return {address for _, address, listens in _tcp_sockets() if listens}


def _tcp_sockets() -> Iterator[tuple[socket.socket, tuple, bool]]:
    """Yield (duplicate, local address, True if it listens) for each TCP socket of this process."""
    folder = "/proc/self/fd"
    for number in map(int, os.listdir(folder) if os.path.isdir(folder) else ()):
        # Another thread may have closed the socket.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        yield found, found.getsockname()[:2], bool(listens)
