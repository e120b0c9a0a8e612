"""Failures in a step: if one rank of an engine fails, the step raises on all ranks (docs/embedding.md).

If a function passed by the caller (such as loss_fn) fails, the rank finishes the call with losses of 0, so
that its collectives match the other ranks'. After any other failure, ranks compare how many collectives they
have entered. The engine stays usable if every rank failed after the same number. Otherwise ranks may wait in
collectives that failed ranks never enter, so all ranks abort the engine's groups, and the engine is lost. A
failure in a pipeline schedule always loses the engine, because the counts don't show whether sends match.

A thread of each rank waits for failure messages in the store of the default process group. A step without a
failure sends no messages.
"""

import contextlib
import itertools
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.processes.own_groups import abort_groups, forget_meshes, making_groups
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import LostConnectionError, RunError
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import run_beside

T = TypeVar("T")

# In seconds: how long a rank waits until all ranks have read its message, how long a failed rank waits for
# the other ranks to fail too, and how long `close` waits for the thread to end.
_SECONDS_TO_HEAR = 3
_SECONDS_TO_FAIL_TOO = 2
_SECONDS_TO_CLOSE = 1
# The store counts milliseconds in 31 bits.
_LONGEST_WAIT = timedelta(days=20)
# Errors are cut to this number of characters when they are sent to other ranks.
_LONGEST_TEXT = 2000
# Indices of watches. All ranks make watches in the same order.
_watches = itertools.count()


class Watch:
    """The watch of an engine without other ranks: a failure is raised where it happens."""

    # After a failure, ranks compare how many collectives each process group has run. This is False during a
    # pipeline schedule, because the counts don't show whether every send between two ranks has a receive.
    counts_collectives = True

    def call(self) -> contextlib.AbstractContextManager[None]:
        """Enter this around a call that all ranks make. Raises RunError if the engine is lost."""
        return contextlib.nullcontext()

    def attempt(self, function: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return `function()`. If it or an earlier function of this call failed, return `instead()`."""
        return function()

    def raise_failures(self) -> None:
        """Raise the failure of a function that `attempt` called; the other ranks raise RunError. Collective."""

    def close(self) -> None:
        """Stop watching. All ranks call this once the engine makes no more collective calls."""


class FailureWatch(Watch):
    """The watch of an engine on several ranks: all ranks raise if one rank fails. All ranks make it together.

    groups: the groups that steps communicate over. host_group: all ranks, for tensors in host memory.
    """

    def __init__(self, groups: Collection[dist.ProcessGroup], host_group: dist.ProcessGroup):
        self._groups, self._host_group = groups, host_group
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        name, store = f"torchtitan/failures/{next(_watches)}", torch_parts.default_store()
        self._store = dist.PrefixStore(name, store)
        # Number of the current or last call, the same on every rank.
        self._call = 0
        # A failure of a function on another rank: (number of the call, rank, error). The number is
        # `_call` + 1 if the failed rank has begun the next call before this rank.
        self._reported: tuple[int, int, str] | None = None
        # The exception of this rank's failed function in this call.
        self._own: BaseException | None = None
        # The exception that `raise_failures` raised.
        self._raised: BaseException | None = None
        # Why the engine is lost: (failed rank, error). None while the engine is usable.
        self._lost: tuple[int, str] | None = None
        # A wait blocks a connection to the store, so the thread gets its own. A FileStore cannot be cloned.
        with contextlib.suppress(RuntimeError):
            store = store.clone()
        store = dist.PrefixStore(name, store)
        self._listening = run_beside(lambda: self._listen(store))

    def close(self) -> None:
        if not self._listening.done():
            # On another thread, because the store may be gone or hang.
            run_beside(lambda: self._send("closed", ""))
            futures.wait([self._listening], _SECONDS_TO_CLOSE)
        if self._lost is not None:
            forget_meshes()

    # ---- around a call ----

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        if self._listening.done() and (error := self._listening.exception()) is not None:
            self._lose(error)
            raise error
        if self._lost is not None:
            raise self._lost_error()
        if (late := self._take_failure()) is not None:
            raise late
        self._call += 1
        try:
            yield
        except BaseException as error:
            is_raised_on_all, self._raised, self._own = error is self._raised, None, None
            if not (is_raised_on_all or self._failed_on_all_ranks()):
                self._lose(error)
            raise

    def attempt(self, function: Callable[[], T], instead: Callable[[], T]) -> T:
        if self._own is None:
            try:
                return function()
            except BaseException as error:
                self._own = error
                if isinstance(error, MemoryError | torch.OutOfMemoryError):
                    # Free the function's tensors.
                    traceback.clear_frames(error.__traceback__)
                # The first rank to fail informs all ranks before any rank can end this call. The store may
                # be gone.
                with contextlib.suppress(RuntimeError):
                    if self._store.add(f"failed/{self._call}", 1) == 1:
                        self._send("function", _text_of(error))
        return instead()

    def raise_failures(self) -> None:
        # Ranks wait for each other, so that all have made this call's last `attempt`.
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self._host_group)
        self._raised = self._take_failure()
        if self._raised is not None:
            raise self._raised

    def _take_failure(self) -> BaseException | None:
        failure, reported = self._own, self._reported
        self._own = None
        if reported is not None and reported[0] <= self._call:
            _, rank, text = reported
            self._reported = None
            failure = failure or RunError(
                f"rank {rank} failed in the loss_fn, output_fn or head that its caller passed: "
                f"{text}"
            )
        return failure

    # ---- failures that leave ranks out of step ----

    def _failed_on_all_ranks(self) -> bool:
        """Return True if every rank calls this in time, after the same number of collectives."""
        meeting = dist.PrefixStore(f"met/{self._call}", self._store)
        try:
            if self._lost is not None or self._store.check(["lost"]):
                return False
            for group in self._groups:
                number = str(torch_parts.collectives_so_far(group))
                if meeting.compare_set(group.group_name, "", number).decode() != number:
                    meeting.set("differ", "")
            if not self.counts_collectives:
                meeting.set("differ", "")
            if meeting.add("came", 1) == self._num_ranks:
                meeting.set("all came", "")
            deadline = time.monotonic() + _SECONDS_TO_FAIL_TOO
            while not meeting.check(["all came"]):  # store.wait would log its time-out
                if self._lost is not None or time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            self._reported = None
            return not meeting.check(["differ"])
        except (RuntimeError, KeyboardInterrupt):  # the store is gone, or the user pressed Ctrl-C
            return False

    def _lose(self, error: BaseException) -> None:
        """Mark the engine as lost; all ranks raise, with the reason of the first rank to call this."""
        own = json.dumps([self._rank, _text_of(error)])
        try:
            first = self._store.compare_set("lost", "", own).decode()
            if first == own:
                self._send("lost", _text_of(error))
        except RuntimeError:
            first = own
        if self._lost is None:
            self._lost = tuple(json.loads(first))
        abort_groups(self._groups)
        forget_meshes()
        rank, _ = self._lost
        if rank != self._rank and isinstance(error, Exception):
            raise self._lost_error() from error
        error.add_note(f"{self._lost_error()}")
        logger.error("%s", self._lost_error())

    def _lost_error(self) -> LostConnectionError:
        rank, text = self._lost
        return LostConnectionError(
            f"rank {rank} failed in a step that other ranks continued: {text}. The ranks' "
            "collectives no longer match and were aborted; close this engine and build a new engine"
        )

    # ---- messages ----

    def _send(self, kind: str, text: str) -> None:
        """Send a message to all ranks; for kind "function", wait until they have read it."""
        number = self._store.add("sent", 1) - 1
        self._store.set(f"message/{number}", json.dumps([kind, self._call, self._rank, text]))
        if kind == "function":
            self._store.wait([f"message/{number}/known"], timedelta(seconds=_SECONDS_TO_HEAR))

    def _listen(self, store: dist.Store) -> None:
        # The rank that holds the store may have ended.
        with contextlib.suppress(RuntimeError):
            for number in itertools.count():
                name = f"message/{number}"
                while not store.check([name]):
                    # Wait again if no message came in time.
                    with contextlib.suppress(dist.DistStoreError):
                        store.wait([name], _LONGEST_WAIT)
                kind, call, rank, text = json.loads(store.get(name))
                if kind == "closed":
                    return
                if kind == "lost":
                    self._lost = rank, text
                    abort_groups(self._groups)
                elif rank != self._rank:
                    self._reported = call, rank, text
                if store.add(f"{name}/num_know", 1) == self._num_ranks:
                    store.set(f"{name}/known", "")


def _text_of(error: BaseException) -> str:
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__  # a pipeline stage wraps its errors
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]


def watch_over(
    parallel_dims: ParallelDims, groups: Collection[dist.ProcessGroup], device: torch.device
) -> Watch:
    """Return the watch of an engine, over `groups` and the groups of all meshes. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return Watch()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    groups = {*groups, *(mesh.get_group() for mesh in meshes)}
    groups = {group for group in groups if dist.get_backend(group) != "fake"}
    if device.type == "cpu":
        host_group = parallel_dims.world_mesh.get_group()
    else:
        with making_groups():
            host_group = dist.new_group(backend="gloo", group_desc="torchtitan on the host")
    return FailureWatch([*groups, host_group], host_group)
