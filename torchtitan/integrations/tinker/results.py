"""Accepted requests, and their results, which clients fetch later by id."""

import dataclasses
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torchtitan.integrations.tinker.request_queue import Command
from torchtitan.integrations.tinker.requests import Answer, Refused, take

_MAX_WAITING = 8192  # largest number of requests without a result
_SECONDS_TO_HOLD = 20  # how long a fetch may wait for a result

# A fetched result is kept while memory lasts, because the client may have lost the connection; fetched
# results are dropped first. Request ids are kept longer, so a request that is sent twice runs only once.
_MAX_BYTES = 2**30  # memory limit of all results
_MAX_KNOWN = 2**16  # largest number of request ids

# Replaces dropped results.
_DROPPED = Answer(status=410)


@dataclass
class _Request:
    """An accepted request. result: an answer or an exception; None while the request runs."""

    request_id: str
    digest: bytes  # a later request with the same id and digest is a retry
    channel: Any  # `retrieve_many` lists the finished requests of one channel
    accepted: Answer
    result: Answer | Exception | None = None
    is_fetched: bool = False

    @property
    def n_bytes(self) -> int:
        return len(getattr(self.result, "protobuf", None) or b"")


def _digest(request: bytes | dict[str, Any]) -> bytes:
    if isinstance(request, dict):
        request = json.dumps(request, sort_keys=True).encode()
    return hashlib.sha256(request).digest()


class Results:
    """The requests of all clients. Safe to call from any thread. put: a function that queues a command."""

    def __init__(self, put: Callable[[Command], None]):
        self._put = put
        self._changed = threading.Condition()
        self._all: dict[str, _Request] = {}
        self._n_waiting = self._n_bytes = 0
        self._is_closed = False
        # channel -> cursor -> finished request; later finished requests have larger cursors
        self._done: defaultdict[Any, dict[int, _Request]] = defaultdict(dict)
        self._cursors = count(1)

    def known(self, request_id: str, content: bytes | dict[str, Any]) -> Answer | None:
        """Return the answer to a request that was accepted before; None for a new request.

        Raises Refused if the accepted request with this id had other content.
        """
        request = self._all.get(request_id)
        if request is not None and request.digest != _digest(content):
            raise Refused(
                f"request {request_id} was accepted before with other content: another program "
                "may use the same model or sampler; make a client for each program"
            )
        return None if request is None else request.accepted

    def submit(
        self,
        request_id: str,
        content: bytes | dict[str, Any],
        command: Command,
        write: Callable[[Any], Answer],
        undo: Callable[[], None] = lambda: None,
        channel: Any = None,
        **extra: Any,
    ) -> Answer:
        """Queue a request's command; `write` converts the command's result to an answer.

        content: the request as sent, or its JSON values. undo: called if the request is refused or the
        command fails. extra: further entries of the answer.
        """
        answer = Answer({"request_id": request_id} | extra)
        request = _Request(request_id, _digest(content), channel, answer)
        with self._changed:
            if len(self._all) >= _MAX_KNOWN:
                self._forget_old()
            if (known := self.known(request_id, content)) is not None:
                return known
            if self._n_waiting >= _MAX_WAITING:
                undo()
                raise Refused(f"{_MAX_WAITING} requests wait already; send this again later", 429)
            self._n_waiting += 1
            self._all[request_id] = request

        def finish(result: Any) -> None:
            if isinstance(result, Exception):
                undo()
            self._finish(request, result if isinstance(result, Exception) else write(result))

        self._put(dataclasses.replace(command, answer=finish))
        return answer

    def _finish(self, request: _Request, result: Answer | Exception) -> None:
        with self._changed:
            if request.result is not None:
                return
            request.result = result
            self._n_waiting -= 1
            self._n_bytes += request.n_bytes
            if self._n_bytes > _MAX_BYTES:
                held = [r for r in self._all.values() if r.n_bytes and r is not request]
                # Drop fetched results before unfetched results, and old results before new results. Drop a
                # quarter at once, because sorting is slow.
                held.sort(key=lambda r: not r.is_fetched)
                self._drop(held[: max(len(held) // 4, 1)])
            if request.channel is not None:
                self._done[request.channel][next(self._cursors)] = request
            self._changed.notify_all()

    def _drop(self, dropped: list[_Request]) -> None:
        """Drop results, but keep the requests' ids."""
        for request in dropped:
            self._n_bytes -= request.n_bytes
            request.result = _DROPPED

    def _forget_old(self) -> None:
        """Drop half of the finished requests, and their ids: fetched before unfetched, old before new."""
        finished = [r for r in self._all.values() if r.result is not None]
        finished.sort(key=lambda r: r.result is not _DROPPED and not r.is_fetched)
        self._drop(old := finished[: len(finished) // 2])
        for request in old:
            del self._all[request.request_id]
        for channel, done in list(self._done.items()):
            self._done[channel] = {c: r for c, r in done.items() if r.result is not _DROPPED}

    def retrieve(self, request_id: str) -> Answer:
        """Return a request's result, or status 408 if it has not finished within `_SECONDS_TO_HOLD`."""
        with self._changed:
            request = self._all.get(request_id)
            self._changed.wait_for(
                lambda: request is None or request.result is not None or self._is_closed,
                _SECONDS_TO_HOLD,
            )
            if request is None or request.result is _DROPPED:
                raise Refused(f"request {request_id} is unknown, or was fetched long ago", 410)
            result = request.result
            if result is None:
                waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return Answer(waiting, status=408)
            request.is_fetched = True
        if isinstance(result, ValueError):
            return Answer({"error": str(result), "category": "user"})
        if isinstance(result, Exception):
            return Answer({"error": f"{type(result).__name__}: {result}", "category": "server"})
        return result

    def retrieve_many(self, values: dict[str, Any], channel: Any) -> Answer:
        """Return the ids of a channel's requests that finished after a cursor, and the next cursor."""
        seconds = take(values, "timeout", float, float(_SECONDS_TO_HOLD))
        cursor = take(values, "prev_cursor", int, 0)
        fetched = take(values, "retrieved_request_ids", list, [])
        with self._changed:
            own = (self._all.get(str(request_id)) for request_id in fetched)
            self._drop([r for r in own if r and r.channel == channel and r.result is not None])
            self._done[channel] = {c: r for c, r in self._done[channel].items() if c > cursor}
            self._changed.wait_for(
                lambda: self._done[channel] or self._is_closed,
                max(0.0, min(seconds, _SECONDS_TO_HOLD)),
            )
            done = self._done[channel]
            completions = [
                {
                    "state": "failed" if isinstance(request.result, Exception) else "finished",
                    "request_id": request.request_id,
                }
                for request in done.values()
            ]
            return Answer({"completions": completions, "cursor": max(done, default=cursor)})

    def close(self, error: Exception) -> None:
        """Finish all waiting requests with an error."""
        with self._changed:
            for request in self._all.values():
                self._finish(request, error)
            self._is_closed = True
            self._changed.notify_all()
