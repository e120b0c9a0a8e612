"""The thread on which a local client's calls run, one after another."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from torchtitan.distributed.processes.ranks import num_ranks
from torchtitan.integrations.tinker.types import ClientFuture
from torchtitan.tools.utils import use_device

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallThread:
    """Runs calls one by one in their order, on one thread; joins calls that share a key."""

    def __init__(self, device: torch.device):
        self._pool = ThreadPoolExecutor(
            1, "training client", initializer=use_device, initargs=(device,)
        )
        self._lock = threading.Lock()
        # The key and the (item, future) pairs of the last call, while more items may join it.
        self._joinable: tuple[Any, list[tuple[Any, Future]]] | None = None

    def submit(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> ClientFuture[_T]:
        return self.submit_item(lambda _: [call(*args, **kwargs)], None, object())

    def submit_item(
        self, call: Callable[[list[Any]], list[_T]], item: Any, key: Any
    ) -> ClientFuture[_T]:
        """Pass items that were submitted in a row with the same key to one `call`.

        Items join while the thread is busy with an earlier call. Under torchrun each item gets its
        own call, because the ranks, which have to make the same calls, are not busy equally long.
        """
        future: ClientFuture[_T] = ClientFuture()
        with self._lock:
            if self._joinable is None or self._joinable[0] != key or num_ranks() > 1:
                self._joinable = key, []
                self._pool.submit(self._run, call, self._joinable[1])
            self._joinable[1].append((item, future))
        return future

    def _run(self, call: Callable[[list[Any]], list[_T]], items: list[tuple[Any, Future]]) -> None:
        with self._lock:
            if self._joinable is not None and self._joinable[1] is items:
                self._joinable = None
        items = [entry for entry in items if entry[1].set_running_or_notify_cancel()]
        try:
            results = call([item for item, _ in items]) if items else []
        except BaseException as error:
            for _, future in items:
                future.set_exception(error)
            return
        for (_, future), result in zip(items, results, strict=True):
            future.set_result(result)

    def shutdown(self) -> None:
        self._pool.shutdown()


def on_thread(method: Callable[_P, _T]) -> Callable[_P, ClientFuture[_T]]:
    """Make a method run on the client's thread, after all earlier calls, and return a future."""

    @functools.wraps(method)
    def submit(self: Any, *args: Any, **kwargs: Any) -> ClientFuture[_T]:
        return self._thread.submit(method, self, *args, **kwargs)

    return submit
