"""Accepted requests, and their results, which clients fetch later: one by id, or a sampler's at once."""

import dataclasses
import hashlib
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from torchtitan.integrations.tinker import wire
from torchtitan.integrations.tinker.requests import Refused, take
from torchtitan.integrations.tinker.types import ForwardBackwardOutput, SampleResponse

if TYPE_CHECKING:
    from torchtitan.integrations.tinker.request_queue import Command

_MAX_WAITING = 8192  # requests without a result
_SECONDS_TO_HOLD = 20  # how long a client's request may wait for a result
# A fetched result stays for a while, because the client's connection may have broken. A result that
# nobody fetches is dropped, too, but later, or when results take too much memory. The request's id
# stays longer, so that a request that is sent again is not carried out again.
_SECONDS_AFTER_FETCHING = 120
_SECONDS_UNFETCHED = 3600
_SECONDS_BETWEEN_DROPS = 10
_MAX_BYTES = 2**30  # of results
_MAX_KNOWN = 2**16  # requests whose ids stay


@dataclass
class Answer:
    """JSON values of an answer, and protobuf in their place for clients that accept it.

    values, protobuf: may be functions that return them, called when the answer is sent. n_bytes: of
        the memory that they hold, if it may be much.
    write: writes bytes in place of values, `length` of them.
    on_host: makes the answer, of the URL under which the client has reached the server.
    """

    values: Any = None
    status: int = 200
    protobuf: Callable[[], bytes] | None = None
    n_bytes: int = 0
    write: Callable[[BinaryIO], None] | None = None
    length: int = 0
    on_host: "Callable[[str], Answer] | None" = None


_DROPPED = Answer(status=410)  # in place of results


@dataclass
class Pending:
    """An accepted request. result: an answer or an exception; None while the request runs.

    content: its `digest_of`; a request with the same id and the same content is one that is sent again.
    channel: key under which `retrieve_many` finds the request once it is done.
    extra: entries of the accepting answer besides the id.
    """

    request_id: str
    content: bytes
    channel: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    result: Answer | Exception | None = None
    forget_at: float = math.inf

    def accepted(self) -> Answer:
        return Answer({"request_id": self.request_id} | self.extra)


def digest_of(request: bytes | dict[str, Any]) -> bytes:
    """Return what tells the content of requests apart. request: as sent, or its JSON values."""
    if isinstance(request, dict):
        request = json.dumps(request, sort_keys=True).encode()
    return hashlib.sha256(request).digest()


class Results:
    """The requests of all clients. Safe to call from any thread. put: queues a command."""

    def __init__(self, put: "Callable[[Command], None]"):
        self._put = put
        self._changed = threading.Condition()
        self._all: dict[str, Pending] = {}
        self._n_waiting = self._n_bytes = 0
        self._is_closed = False
        self._next_drop_at = 0.0
        # channel -> cursor -> finished request; cursors grow in the order of finishing
        self._done: defaultdict[Any, dict[int, Pending]] = defaultdict(dict)
        self._cursors = count(1)

    def known(self, request_id: str, content: bytes) -> Answer | None:
        """Return the answer to a request that was accepted before; None for a new request.

        Raises Refused if the request before had the same id and another content.
        """
        with self._changed:
            pending = self._all.get(request_id)
        if pending is not None and pending.content != content:
            raise Refused(
                f"request {request_id} was accepted before with other content, as if another program "
                "trained this model, or drew from this sampler, too; make a client for each program"
            )
        return None if pending is None else pending.accepted()

    def accept(self, pending: Pending) -> Answer | None:
        """Add a new request and return None; for a repeated request return its first answer."""
        now = time.monotonic()
        with self._changed:
            if now >= self._next_drop_at:
                self._next_drop_at = now + _SECONDS_BETWEEN_DROPS
                self._drop([p for p in self._all.values() if p.forget_at < now])
                dropped = [k for k, p in self._all.items() if p.result is _DROPPED]
                for old in dropped[: max(len(self._all) - _MAX_KNOWN, 0)]:
                    del self._all[old]
                for channel, done in list(self._done.items()):
                    self._done[channel] = {
                        c: p for c, p in done.items() if p.result is not _DROPPED
                    }
            if (answer := self.known(pending.request_id, pending.content)) is not None:
                return answer
            if self._n_waiting >= _MAX_WAITING:
                raise Refused(f"{_MAX_WAITING} requests wait already; send this again later", 429)
            self._n_waiting += 1
            self._all[pending.request_id] = pending
            return None

    def submit(
        self,
        request_id: str,
        request: bytes | dict[str, Any],
        command: "Command",
        write: Callable[[Any], Answer],
        undo: Callable[[], None] = lambda: None,
        **extra: Any,
    ) -> Answer:
        """Queue a request's command; `write` encodes its result for the client.

        request: see `digest_of`. undo: called if the command fails.
        """
        pending = Pending(request_id, digest_of(request), extra=extra)
        try:
            answer = self.accept(pending)
        except Refused:
            undo()
            raise
        if answer is not None:
            return answer

        def finish(result: Any) -> None:
            if isinstance(result, Exception):
                undo()
                self.finish(pending, result)
            else:
                self.finish(pending, write(result))

        self._put(dataclasses.replace(command, answer=finish))
        return pending.accepted()

    def finish(self, pending: Pending, result: Answer | Exception) -> None:
        with self._changed:
            if pending.result is not None:
                return
            pending.result = result
            pending.forget_at = time.monotonic() + _SECONDS_UNFETCHED
            self._n_waiting -= 1
            self._n_bytes += result.n_bytes if isinstance(result, Answer) else 0
            if self._n_bytes > _MAX_BYTES:
                # Fetched results have the earliest times. Drop many at once, because sorting takes time.
                held = (p for p in self._all.values() if p.forget_at < math.inf)
                held = sorted(held, key=lambda p: p.forget_at)[:-1]
                self._drop(held[: max(len(held) // 4, 1)])
            if pending.channel is not None:
                self._done[pending.channel][next(self._cursors)] = pending
            self._changed.notify_all()

    def _drop(self, dropped: list[Pending]) -> None:
        """Forget results, but not that the requests were carried out."""
        for pending in dropped:
            self._n_bytes -= pending.result.n_bytes if isinstance(pending.result, Answer) else 0
            pending.result, pending.forget_at = _DROPPED, math.inf

    def retrieve(self, values: dict[str, Any]) -> Answer:
        """Return a request's result, or status 408 if it is not there in time."""
        request_id = take(values, "request_id", str)
        with self._changed:
            pending = self._all.get(request_id)
            self._changed.wait_for(
                lambda: pending is None or pending.result is not None or self._is_closed,
                _SECONDS_TO_HOLD,
            )
            if pending is None or pending.result is _DROPPED:
                raise Refused(f"request {request_id} is unknown, or was fetched long ago", 410)
            result = pending.result
            if result is None:
                waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return Answer(waiting, status=408)
            pending.forget_at = time.monotonic() + _SECONDS_AFTER_FETCHING
        if isinstance(result, Exception):
            is_users = isinstance(result, ValueError)
            message = str(result) if is_users else f"{type(result).__name__}: {result}"
            return Answer({"error": message, "category": "user" if is_users else "server"})
        return result

    def retrieve_many(self, values: dict[str, Any], channel: Any) -> Answer:
        """Return the ids of the channel's requests that finished after a cursor, and a new cursor."""
        seconds = take(values, "timeout", float, float(_SECONDS_TO_HOLD))
        cursor = take(values, "prev_cursor", int, 0)
        fetched = take(values, "retrieved_request_ids", list, [])
        with self._changed:
            own = (self._all.get(str(request_id)) for request_id in fetched)
            self._drop([p for p in own if p and p.channel == channel and p.forget_at < math.inf])
            done = {c: p for c, p in self._done[channel].items() if c > cursor}
            self._done[channel] = done
            self._changed.wait_for(
                lambda: self._done[channel] or self._is_closed,
                max(0.0, min(seconds, _SECONDS_TO_HOLD)),
            )
            done = self._done[channel]
            completions = [
                {
                    "state": "failed" if isinstance(pending.result, Exception) else "finished",
                    "request_id": pending.request_id,
                }
                for pending in done.values()
            ]
            return Answer({"completions": completions, "cursor": max(done, default=cursor)})

    def close(self, error: Exception) -> None:
        """Finish all waiting requests with an error."""
        with self._changed:
            for pending in self._all.values():
                self.finish(pending, error)
            self._is_closed = True
            self._changed.notify_all()


_BYTES_PER_VALUE = 100  # in lists of token ids and log-probs


def write_output(output: ForwardBackwardOutput) -> Answer:
    # The word behind the colon tells clients how to reduce a metric over several requests.
    metrics = {
        name if ":" in name else f"{name}:{'max' if name.endswith('_max') else 'mean'}": value
        for name, value in output.metrics.items()
        if math.isfinite(value)  # JSON has no NaN or infinity
    }
    # Copies, because parts of a batch would keep the whole batch.
    logprobs = [np.array(outputs["logprobs"].cpu()) for outputs in output.loss_fn_outputs]

    def values() -> dict[str, Any]:
        outputs = [
            {"logprobs": {"data": x.tolist(), "dtype": "float32", "shape": list(x.shape)}}
            for x in logprobs
        ]
        kind = "ArrayRecord"
        return {"loss_fn_output_type": kind, "loss_fn_outputs": outputs, "metrics": metrics}

    write = partial(wire.write_forward_backward, logprobs, metrics)
    return Answer(values, protobuf=write, n_bytes=sum(x.nbytes for x in logprobs))


def write_samples(response: SampleResponse, k: int) -> Answer:
    """k: the number of most probable tokens at each place of the prompt; 0 for none."""
    sequences = [vars(sequence) for sequence in response.sequences]
    n_values = sum(len(sequence.tokens) for sequence in response.sequences)
    n_values += len(response.prompt_logprobs or ()) + k * len(response.topk_prompt_logprobs or ())
    return Answer(
        {"type": "sample", **vars(response), "sequences": sequences},
        protobuf=partial(wire.write_samples, response, k),
        n_bytes=_BYTES_PER_VALUE * n_values,
    )
