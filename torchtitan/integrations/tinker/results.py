"""Accept requests, answer with their results later, and encode results."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.integrations.tinker import wire
from torchtitan.integrations.tinker.futures import Futures, Pending
from torchtitan.integrations.tinker.requests import Refused, take
from torchtitan.integrations.tinker.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from torchtitan.integrations.tinker.policy import Command

_SECONDS_TO_HOLD = 20  # how long a client's request may wait for a result
_MAX_WAITING = 8192


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. values: sent as JSON. body: protobuf to send in their place."""

    values: Any = None
    status: int = 200
    body: bytes | None = None


@dataclass
class Result:
    """A result as JSON values, and, for some types, as protobuf for clients that accept it."""

    values: dict[str, Any]
    body: bytes | None = None


class Results:
    """Requests whose results clients fetch later. put: queues a command for the policy."""

    def __init__(self, put: "Callable[[Command], None]"):
        self._put = put
        self.futures = Futures(_MAX_WAITING)

    def known(self, request_id: str) -> Answer | None:
        """Return the answer to a request that was accepted before; None for a new request."""
        pending = self.futures.wait(request_id, 0)
        return None if pending is None else accepted(pending)

    def accept(self, pending: Pending) -> Answer | None:
        """Add a new request and return None; for a repeated request return its first answer."""
        found = self.futures.accept(pending)
        if found is None:
            raise Refused(f"{_MAX_WAITING} requests wait already; send this one again later", 429)
        return None if found is pending else accepted(found)

    def submit(
        self, request_id: str, command: "Command", write: Callable[[Any], Result], **extra: Any
    ) -> Answer:
        """Queue a command; `write` encodes its result for the client."""
        pending = Pending(request_id, extra=extra)
        if (answer := self.accept(pending)) is not None:
            return answer

        def finish(result: Any) -> None:
            is_error = isinstance(result, Exception)
            self.futures.finish(pending, result if is_error else write(result))

        self._put(dataclasses.replace(command, answer=finish))
        return accepted(pending)

    def retrieve(self, values: dict[str, Any], accepts_protobuf: bool) -> Answer:
        """Return a request's result, or status 408 if it is not there in time."""
        request_id = take(values, "request_id", str)
        pending = self.futures.wait(request_id, _SECONDS_TO_HOLD)
        if pending is None:
            raise Refused(f"request {request_id} is not known, or was fetched long ago", 410)
        result = pending.result
        if result is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return Answer(waiting, status=408)
        if isinstance(result, Exception):
            is_users = isinstance(result, ValueError)
            message = str(result) if is_users else f"{type(result).__name__}: {result}"
            return Answer({"error": message, "category": "user" if is_users else "server"})
        if result.body is not None and accepts_protobuf:
            return Answer(body=result.body)
        return Answer(result.values)

    def retrieve_many(self, values: dict[str, Any], channel: Any) -> Answer:
        """Return the ids of a channel's finished requests."""
        seconds = take(values, "timeout", float, float(_SECONDS_TO_HOLD))
        done, cursor = self.futures.wait_for_channel(
            channel,
            take(values, "prev_cursor", int, 0),
            max(0.0, min(seconds, _SECONDS_TO_HOLD)),
        )
        completions = [
            {
                "state": "failed" if isinstance(pending.result, Exception) else "finished",
                "request_id": pending.request_id,
            }
            for pending in done
        ]
        return Answer({"completions": completions, "cursor": cursor})


def accepted(pending: Pending) -> Answer:
    return Answer({"request_id": pending.request_id} | pending.extra)


def write_output(output: ForwardBackwardOutput) -> Result:
    # The word behind the colon tells clients how to reduce a metric over several requests.
    metrics = {
        name if ":" in name else f"{name}:{'max' if name.endswith('_max') else 'mean'}": value
        for name, value in output.metrics.items()
        if math.isfinite(value)  # JSON has no NaN or infinity
    }
    logprobs = [np.asarray(outputs["logprobs"].cpu()) for outputs in output.loss_fn_outputs]
    values = {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": _tensor(array)} for array in logprobs],
        "metrics": metrics,
    }
    return Result(values, wire.write_forward_backward(logprobs, metrics))


def _tensor(array: np.ndarray) -> dict[str, Any]:
    return {"data": array.tolist(), "dtype": "float32", "shape": list(array.shape)}


def write_samples(sequences: Any, prompt_logprobs: list[float | None] | None) -> Result:
    values = {
        "type": "sample",
        "sequences": [vars(sequence) for sequence in sequences],
        "prompt_logprobs": prompt_logprobs,
    }
    triples = [(s.tokens, s.logprobs, s.stop_reason) for s in sequences]
    return Result(values, wire.write_samples(triples, prompt_logprobs))
