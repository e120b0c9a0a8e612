"""Results that clients fetch later: by request id, or all that a sampler has finished."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# A fetched result stays for a while, because the client's connection may have broken. A result that
# nobody fetches is dropped, too, but later.
_SECONDS_AFTER_FETCHING = 120
_SECONDS_UNFETCHED = 3600
_SECONDS_BETWEEN_DROPS = 10


@dataclass
class Pending:
    """An accepted request. result: the value to send, or the exception; None while it runs.

    channel: key under which `wait_for_channel` finds the request once it is done.
    extra: entries of the accepting answer besides the id.
    """

    request_id: str
    channel: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    forget_at: float = float("inf")


class Futures:
    """The requests of all clients. Safe to call from any thread.

    limit: the most requests without a result at the same time.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._changed = threading.Condition()
        self._all: dict[str, Pending] = {}
        self._n_open = 0
        self._is_closed = False
        self._next_drop_at = 0.0
        # channel -> (cursor, request) of finished requests; channel -> the last cursor
        self._done: defaultdict[Any, list[tuple[int, Pending]]] = defaultdict(list)
        self._n_done: defaultdict[Any, int] = defaultdict(int)

    def accept(self, pending: Pending) -> Pending | None:
        """Add a request and return it; None if too many wait.

        If the client has sent the request before, return the earlier `Pending`.
        """
        now = time.monotonic()
        with self._changed:
            if now >= self._next_drop_at:
                self._next_drop_at = now + _SECONDS_BETWEEN_DROPS
                for old in [p for p in self._all.values() if p.forget_at < now]:
                    del self._all[old.request_id]
                    done = self._done.get(old.channel, [])
                    done[:] = [entry for entry in done if entry[1] is not old]
            if known := self._all.get(pending.request_id):
                return known
            if self._n_open >= self._limit:
                return None
            self._n_open += 1
            self._all[pending.request_id] = pending
            return pending

    def finish(self, pending: Pending, result: Any) -> None:
        with self._changed:
            if pending.result is not None:
                return
            pending.result = result
            pending.forget_at = time.monotonic() + _SECONDS_UNFETCHED
            self._n_open -= 1
            if pending.channel is not None:
                self._n_done[pending.channel] += 1
                self._done[pending.channel].append((self._n_done[pending.channel], pending))
            self._changed.notify_all()

    def wait(self, request_id: str, seconds: float) -> Pending | None:
        """Return the request, finished or not, after at most `seconds`; None for an unknown id."""
        with self._changed:
            pending = self._all.get(request_id)
            if pending is not None:
                self._changed.wait_for(
                    lambda: pending.result is not None or self._is_closed, seconds
                )
                if pending.result is not None:
                    pending.forget_at = time.monotonic() + _SECONDS_AFTER_FETCHING
            return pending

    def wait_for_channel(
        self, channel: Any, after: int, seconds: float
    ) -> tuple[list[Pending], int]:
        """Return the channel's requests that finished after a cursor, and the next cursor."""
        with self._changed:
            self._done[channel] = [entry for entry in self._done[channel] if entry[0] > after]
            self._changed.wait_for(lambda: self._done[channel] or self._is_closed, seconds)
            found = self._done[channel]
            return [pending for _, pending in found], found[-1][0] if found else after

    def close(self, error: Exception) -> None:
        """Finish all waiting requests with an error."""
        with self._changed:
            waiting = [pending for pending in self._all.values() if pending.result is None]
        for pending in waiting:
            self.finish(pending, error)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
