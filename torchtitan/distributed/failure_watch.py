"""Ranks of an engine fail together: when one rank fails in a step, all of them raise.

- A function of the caller fails. That rank finishes the call without the function, with losses of
  0, so that its collectives match the other ranks'. Then all ranks raise, and the engine goes on.
- Anything else fails, on all ranks and after the same collectives. Each raises; the engine goes on.
- Anything else fails on some ranks. The others wait in collectives that these ranks never enter, so
  the engine's groups are aborted on every rank. All ranks raise, and the engine is lost.

Ranks tell each other through the store of the default process group. On each rank a thread waits
there for messages, so a step in which nothing fails sends none.
"""

import contextlib
import itertools
import json
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torchtitan.distributed.own_groups import abort_groups, forget_meshes, making_groups
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.errors import LostConnectionError, RunError
from torchtitan.tools.logging import logger

T = TypeVar("T")

_SECONDS_TO_HEAR = 3  # how long a rank waits until all others have read its message
_SECONDS_TO_FAIL_TOO = 2  # how long a failed rank waits for the same failure on the others
_SECONDS_TO_CLOSE = 1
_LONGEST_WAIT = timedelta(days=20)  # milliseconds have to fit into 31 bits
_SECONDS_BETWEEN_LOOKS = 0.05  # into a store that is not waited on
_LONGEST_TEXT = 2000  # characters of an error that other ranks get
_watches = itertools.count()  # of this process, in the same order on every rank


class Alone:
    """The watch of a process without other ranks: a failure is raised where it happens."""

    counts_collectives = True

    def call(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks call together. Raises RunError if the engine is lost."""
        return contextlib.nullcontext()

    def attempt(self, function: Callable[[], T], instead: Callable[[], T]) -> T:
        """What a function of the caller returns; `instead()` if one has failed in this call.

        `raise_failures` raises the failure.
        """
        return function()

    def raise_failures(self, *, waits: bool) -> None:
        """Raise the failure of a function on all ranks, as RunError where it happened elsewhere.

        waits: wait until all ranks are here. Not needed after collectives that depend on what
            every other rank did after its last function.
        """

    def close(self) -> None:
        """The engine makes no more collective calls; on all ranks."""


class FailureWatch(Alone):
    """One rank's part of the watch. All ranks of the default process group make it together.

    groups: that the engine's steps communicate over, which are aborted when the engine is lost.
    host_group: all ranks, for tensors in host memory.
    """

    def __init__(self, groups: Collection[dist.ProcessGroup], host_group: dist.ProcessGroup):
        self._groups, self._host_group = groups, host_group
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        name, store = f"torchtitan/failures/{next(_watches)}", c10d._get_default_store()
        self._store = dist.PrefixStore(name, store)
        self._call = 0  # number of the call that is under way, or was last; the same on every rank
        # Of a function of the caller on another rank, until it is raised: (call, rank, text). That
        # rank may be a call ahead.
        self._told: tuple[int, int, str] | None = None
        self._own: BaseException | None = None  # of a function on this rank, in this call
        self._raised: BaseException | None = None  # on all ranks
        self._lost: tuple[int, str] | None = None  # the rank that failed first, for good
        # False while messages between two ranks, which no group counts, may be under way.
        self.counts_collectives = True
        self._closed = threading.Event()
        try:
            # A connection of its own, which may wait while this rank uses the other.
            store, can_wait = store.clone(), True
        except RuntimeError:  # a FileStore
            can_wait = False
        self._thread = threading.Thread(
            target=self._listen,
            args=(dist.PrefixStore(name, store), can_wait),
            name="failures",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._closed.set()
            # In a thread, as the store may be gone or hang.
            threading.Thread(target=self._send_closed, daemon=True).start()
            self._thread.join(_SECONDS_TO_CLOSE)
        if self._lost is not None:
            forget_meshes()

    # ---- around a call ----

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        if self._lost is not None:
            raise self._lost_error()
        if (late := self._take_failure()) is not None:
            raise late
        self._call += 1
        try:
            yield
        except BaseException as error:
            is_raised_on_all, self._raised, self._own = error is self._raised, None, None
            if not (is_raised_on_all or self._came_on_all_ranks()):
                self._lose(error)
            raise

    def attempt(self, function: Callable[[], T], instead: Callable[[], T]) -> T:
        if self._own is None:
            try:
                return function()
            except BaseException as error:
                self._own = error
                if isinstance(error, MemoryError | torch.OutOfMemoryError):
                    # The rest of the call needs the memory of the function's tensors.
                    traceback.clear_frames(error.__traceback__)
                with contextlib.suppress(RuntimeError):  # of the store
                    # The first to fail tells the others, before any rank can end this call.
                    if self._store.add(f"failed/{self._call}", 1) == 1:
                        self._send("function", _text_of(error))
        return instead()

    def raise_failures(self, *, waits: bool) -> None:
        if waits:
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self._host_group)
        self._raised = self._take_failure()
        if self._raised is not None:
            raise self._raised

    def _take_failure(self) -> BaseException | None:
        failure, told = self._own, self._told
        self._own = None
        if told is not None and told[0] <= self._call:
            _, rank, text = told
            self._told = None
            failure = failure or RunError(
                f"rank {rank} failed in a function that was given for outputs or the loss: {text}"
            )
        return failure

    # ---- failures that leave ranks out of step ----

    def _came_on_all_ranks(self) -> bool:
        """Whether all ranks come here in time, and after the same collectives."""
        meeting = dist.PrefixStore(f"met/{self._call}", self._store)
        try:
            if self._lost is not None or self._store.check(["lost"]):
                return False
            for group in self._groups:
                number = _number_of_collectives(group)
                if meeting.compare_set(group.group_name, "", number).decode() != number:
                    meeting.set("differ", "")
            if not self.counts_collectives:
                meeting.set("differ", "")
            if meeting.add("came", 1) == self._num_ranks:
                meeting.set("all came", "")
            deadline = time.monotonic() + _SECONDS_TO_FAIL_TOO
            while not meeting.check(["all came"]):  # to wait in the store would log the time-out
                if self._lost is not None or time.monotonic() > deadline:
                    return False
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            self._told = None
            return not meeting.check(["differ"])
        except (RuntimeError, KeyboardInterrupt):  # the store is gone, or the user in a hurry
            return False

    def _lose(self, error: BaseException) -> None:
        """Have all ranks raise; the first to come here says why."""
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
            f"rank {rank} failed in a step while other ranks went on: {text}. Their collectives no "
            "longer match and were aborted on all ranks; close this engine and build a new engine"
        )

    # ---- messages ----

    def _send(self, kind: str, text: str) -> None:
        """Tell all ranks. What comes from a function is known to all ranks when this returns."""
        number = self._store.add("sent", 1) - 1
        self._store.set(f"message/{number}", json.dumps([kind, self._call, self._rank, text]))
        if kind == "function":
            self._store.wait([f"message/{number}/known"], timedelta(seconds=_SECONDS_TO_HEAR))

    def _send_closed(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._send("closed", "")

    def _listen(self, store: dist.Store, can_wait: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it its rank
            for number in itertools.count():
                name = f"message/{number}"
                while not store.check([name]):
                    if self._closed.wait(0 if can_wait else _SECONDS_BETWEEN_LOOKS):
                        return
                    if can_wait:
                        with contextlib.suppress(dist.DistStoreError):  # if nothing comes in time
                            store.wait([name], _LONGEST_WAIT)
                kind, call, rank, text = json.loads(store.get(name))
                if kind == "closed":
                    return
                if kind == "lost":
                    self._lost = rank, text
                    abort_groups(self._groups)
                elif rank != self._rank:
                    self._told = call, rank, text
                if store.add(f"{name}/num_know", 1) == self._num_ranks:
                    store.set(f"{name}/known", "")


def _number_of_collectives(group: dist.ProcessGroup) -> str:
    try:
        return str(group._get_sequence_number_for_group())
    except RuntimeError:  # simulated ranks
        return "none"


def _text_of(error: BaseException) -> str:
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__  # a pipeline's stage wraps what goes wrong in it
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]


def watch_over(
    parallel_dims: ParallelDims, groups: Collection[dist.ProcessGroup], device: torch.device
) -> Alone:
    """The watch of an engine. Collective.

    groups: that the engine has made; those of its meshes are added.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return Alone()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    groups = {*groups, *(mesh.get_group() for mesh in meshes)}
    if device.type == "cpu":
        host_group = parallel_dims.world_mesh.get_group()
    else:
        with making_groups():
            host_group = dist.new_group(backend="gloo", group_desc="torchtitan on the host")
    return FailureWatch([*groups, host_group], host_group)
