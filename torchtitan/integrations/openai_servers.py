"""The HTTP servers that sample from a policy. Servers may stop, restart and join during a run."""

import http.client
import itertools
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.rl.checks import addresses_in
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import logger

T = TypeVar("T")

_SECONDS_BETWEEN_LOOKS = 2.0  # while no server answers: pause before trying the servers again
_SECONDS_TO_ANSWER = 10.0  # timeout to connect to a server, and to read its metrics


class LostServerError(RunError):
    """A server does not answer. is_gone: True if it cannot be reached, False if it answers with errors."""

    def __init__(self, message: str, is_gone: bool = True) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class Servers:
    """Tracks which servers have the weights of the last update, and makes restarted servers load them.

    setting: the addresses, see `addresses_in`; read again for each update, so servers may join.
    timeout_seconds: how long to wait while no server answers.

    A restarted server has lost the weights. To detect restarts, an idle connection to each server stays
    open; it closes when the server's process ends. Proxies and TLS servers also close idle connections. So
    after a connection has closed, the start time of the server's process is compared with the earlier start
    time. vLLM reports the start time as a metric. A server without this metric counts as restarted.
    """

    def __init__(self, setting: str, timeout_seconds: float) -> None:
        self._setting, self._timeout_seconds = setting, timeout_seconds
        # Held while servers load weights.
        self._lock = threading.Lock()
        self._turns = itertools.count()
        self._ready: dict[str, _Connection] = {}
        # The first update replaces this function.
        self._load: Callable[[str], None] = lambda _: None

    def addresses(self) -> list[str]:
        return addresses_in(self._setting)

    def update(self, load: Callable[[str], None], *, now: bool = True) -> None:
        """Make all servers that answer load the weights, and wait until at least one has loaded them.

        load: makes the server at an address load the weights; called again for a restarted server.
        now: False only stores `load` for later restarts. Pass False if rank 0 updates the servers and this
            rank calls `share`, or if the weights were sent without files.
        Raises what `load` raises, unless the server is gone.
        """
        with self._lock:
            self._forget(list(self._ready))
            self._load = load
            if now:
                self._load_any()

    def share(self) -> None:
        """Tell all ranks which servers, according to rank 0, have the weights. Collective."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            ready = from_rank_zero(lambda: list(self._ready))
            if dist.get_rank() > 0:
                self._forget(list(self._ready))
                self.trust(ready)

    def trust(self, addresses: list[str]) -> None:
        """Mark these servers as ready, if they accept a connection."""
        for address in addresses:
            with suppress(OSError):
                self._ready[address] = _Connection(address)

    def forget_restarted(self) -> None:
        """Skip servers whose process ended after the last update. Call before sampling."""
        with self._lock:
            for address, idle in list(self._ready.items()):
                if not idle.is_closed():
                    continue
                again = None
                with suppress(OSError):
                    again = _Connection(address)
                if again and idle.started and again.started == idle.started:
                    self._forget([address])
                    self._ready[address] = again
                else:
                    self._forget([address], "it was restarted")

    def call(self, request: Callable[[str], T]) -> T:
        """Return `request(address)` for a server that has the weights; if it is lost, try another server.

        Raises LostServerError if no server answers in time, or every server fails this request.
        """
        n_failures = 0
        while True:
            with self._lock:
                if not self._ready:
                    self._load_any()
                ready = list(self._ready)
            address = ready[next(self._turns) % len(ready)]
            try:
                return request(address)
            except LostServerError as error:
                with self._lock:
                    self._forget([address], str(error))
                n_failures += 1
                if n_failures > len(self.addresses()):
                    raise

    def _load_any(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            addresses = self.addresses()
            with ThreadPoolExecutor(max(1, len(addresses)), "weights") as threads:
                failures = list(threads.map(self._try_to_load, addresses))
            if self._ready:
                return
            if time.monotonic() > deadline:
                raise LostServerError(
                    f"no server of rl.generator.url = {self._setting!r} answered for "
                    f"{self._timeout_seconds:g} s ({failures[-1] if failures else 'none named'}); look at "
                    "the servers' logs, or raise rl.generator.timeout_seconds"
                )
            time.sleep(min(_SECONDS_BETWEEN_LOOKS, self._timeout_seconds / 4))

    def _try_to_load(self, address: str) -> Exception | None:
        """Make a server load the weights. Return the error if the server is gone, else None.

        Raises RunError if the server reports that loading failed.
        """
        try:
            # Open the connection before the load, so that a restart during the load closes it.
            idle = _Connection(address)
            self._load(address)
        except (OSError, LostServerError) as error:
            if not getattr(error, "is_gone", True):
                raise
            return error
        self._ready[address] = idle
        return None

    def _forget(self, addresses: list[str], reason: str = "") -> None:
        for address in addresses:
            if (idle := self._ready.pop(address, None)) is not None:
                idle.socket.close()
                if reason:
                    logger.warning("the server %s is skipped: %s", address, reason)


class _Connection:
    """An idle connection to a server. started: start time of the server's process; "" if unknown."""

    def __init__(self, address: str) -> None:
        to = urlsplit(address)
        port = to.port or (443 if to.scheme == "https" else 80)
        self.socket = socket.create_connection((to.hostname, port), timeout=_SECONDS_TO_ANSWER)
        self.socket.setblocking(False)
        self.started = ""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with suppress(OSError, http.client.HTTPException):
            with opener.open(f"{address}/metrics", timeout=_SECONDS_TO_ANSWER) as answer:
                found = re.search(rb"^process_start_time_seconds (\S+)", answer.read(), re.M)
            self.started = found[1].decode() if found else ""

    def is_closed(self) -> bool:
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
