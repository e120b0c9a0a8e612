"""The protobuf messages of Tinker's interface, read and written without a protobuf library.

Protobuf are forward_backward requests, their results, and the results of sampling; everything else
is JSON. The encoding is that of https://protobuf.dev/programming-guides/encoding, the field numbers
those of `tinker/proto/tinker_public.proto` in the published client, 0.38.0.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.integrations.tinker.types import Datum, ModelInput, SampleResponse

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# DType in messages -> numpy's
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
# Limit for all messages of one request together. A Datum with four inputs has about 30 fields.
MOST_FIELDS = 2**18
_STOP_REASONS = {"stop": 0, "length": 1}
_EMPTY_CELL = 0, -99999.0  # token id and log-prob


class WireError(ValueError):
    """The bytes are not a message of the expected type."""


# ---- reading ----


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at byte `at`, and the index of the byte behind it."""
    number = 0
    for i, byte in enumerate(data[at : at + 10]):
        number |= (byte & 127) << (7 * i)
        if byte < 128:
            return number, at + i + 1
    raise WireError("a number in the message does not end; send messages of the tinker client")


class _Reader:
    """Reads the messages of one request, which may have `MOST_FIELDS` fields together.

    The limit is needed because an empty field takes two bytes of a request and many of memory.
    """

    def __init__(self) -> None:
        self._n_left = MOST_FIELDS

    def fields(self, data: memoryview | int) -> Iterator[tuple[int, Any]]:
        """Yield (field number, value) of a message: an int for varints, else the bytes."""
        if isinstance(data, int):
            raise WireError("the message has a number in place of a message")
        at = 0
        while at < len(data):
            self._n_left -= 1
            if self._n_left < 0:
                raise WireError(
                    f"a request may have {MOST_FIELDS} fields in all its data; send less at once"
                )
            tag, at = _varint(data, at)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                value, at = _varint(data, at)
                yield number, value
                continue
            if kind == _BYTES:
                size, at = _varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise WireError(f"the message has a field of the unknown wire type {kind}")
            if at + size > len(data):
                raise WireError(
                    f"the message ends {at + size - len(data)} bytes early; send it again"
                )
            yield number, data[at : at + size]
            at += size

    def message(self, data: Any, *numbers: int) -> list[Any]:
        """Return the last value of each of these fields; None for a missing field."""
        values = dict(self.fields(data))
        return [values.get(number) for number in numbers]

    def datum(self, message: Any) -> Datum:
        tokens: list[int] = []
        inputs = {}
        for number, value in self.fields(message):
            if number == 1:
                (text,) = self.message(value, 1)
                if text is None:
                    raise ValueError("a Datum's input must be text tokens, got an image or audio")
                tokens += _array(self.message(text, 1)[0], np.dtype("<i4")).tolist()
            elif number == 2:
                key, tensor = self.message(value, 1, 2)
                inputs[_text(key)] = self._tensor(_text(key), tensor or b"")
        return Datum(ModelInput.from_ints(tokens), inputs)

    def _tensor(self, name: str, message: Any) -> np.ndarray:
        dense, sparse, dtype = self.message(message, 1, 2, 3)
        shape = [value for number, value in self.fields(message) if number == 4]
        # Dimensions come packed into one field, or as a field each.
        packed = [value for value in shape if not isinstance(value, int)]
        for value in packed:
            at = 0
            shape = []
            while at < len(value) and len(shape) < 2:
                size, at = _varint(value, at)
                shape.append(size)
        if sparse is not None or len(shape) > 1 or dtype not in _DTYPES:
            raise ValueError(
                f"loss_fn_inputs hold one number per token, of float32 or int64, got {name} of "
                f"shape {shape}{', sparse' if sparse is not None else ''}; several targets per "
                "token are not supported"
            )
        return _array(dense, _DTYPES[dtype]).copy()


def _text(value: Any) -> str:
    if isinstance(value, int):
        raise WireError("the message has a number in place of a name")
    try:
        return bytes(value or b"").decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the message has a name that is not UTF-8: {error}") from error


def _array(data: Any, dtype: np.dtype) -> np.ndarray:
    if isinstance(data, int) or len(data or b"") % dtype.itemsize:
        raise WireError(
            f"an array of {dtype} has bytes left over; send messages of the tinker client"
        )
    return np.frombuffer(data or b"", dtype)


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """A forward_backward request. problem: why its data cannot be used, or None."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float]
    forward_only: bool
    problem: str | None = None


def read_forward_backward(body: bytes, check_model: Callable[[str], Any]) -> ForwardBackwardRequest:
    """Read a request. check_model: called with the model's id before any data are read.

    Raises WireError for bytes that are not a request; exceptions of check_model pass through.
    """
    reader = _Reader()
    fields = list(reader.fields(memoryview(body)))
    values = dict(fields)
    model_id = _text(values.get(1))
    check_model(model_id)
    data: list[Datum] = []
    config: dict[str, float] = {}
    problem = None
    for number, value in fields:
        try:
            if number == 3:
                data.append(reader.datum(value))
            elif number in (5, 7):
                key, setting = reader.message(value, 1, 2)
                if number == 7:
                    setting, text = reader.message(setting or b"", 1, 2)
                    if text is not None:
                        raise ValueError(
                            f"loss_fn_config takes numbers, got {_text(key)} = {_text(text)!r}"
                        )
                numbers = _array(setting, np.dtype("<f8"))
                config[_text(key)] = float(numbers[0]) if numbers.size else 0.0
        except WireError:
            raise
        except ValueError as error:
            problem = problem or f"{error} (datum {len(data)})"
    return ForwardBackwardRequest(
        model_id=model_id,
        seq_id=int(values.get(2, 0)),
        data=data,
        loss_fn=_text(values.get(4)),
        loss_fn_config=config,
        forward_only=bool(values.get(6, 0)),
        problem=problem,
    )


# ---- writing ----


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value)
    if isinstance(value, float):
        return _number(number << 3 | _FIXED64) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _BYTES) + _number(len(data)) + data


def write_forward_backward(logprobs: Sequence[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Return a ForwardBackwardOutput message with the log-probs [n] of each datum, as float32."""
    sizes = [values.size * 4 for values in logprobs]
    offsets = np.cumsum([0, *sizes]).astype("<i8")
    joined = b"".join(values.astype("<f4").tobytes() for values in logprobs)
    tensor = _field(1, joined) + _field(2, offsets.tobytes()) + _field(3, _FLOAT32)
    entry = _field(1, "logprobs") + _field(2, tensor)
    record = _field(1, "ArrayRecord") + _field(2, entry) + _field(3, len(logprobs))
    pairs = (_field(3, _field(1, name) + _field(2, float(v))) for name, v in metrics.items())
    return _field(1, "ArrayRecord") + _field(2, record) + b"".join(pairs)


def write_samples(response: SampleResponse, k: int) -> bytes:
    """Return a SampleResponse message. None becomes NaN, or a row of empty cells of the k top tokens."""
    out = b""
    for sequence in response.sequences:
        entry = _field(1, _STOP_REASONS[sequence.stop_reason])
        entry += _field(2, np.asarray(sequence.tokens, "<i4").tobytes())
        entry += _field(3, np.asarray(sequence.logprobs, "<f4").tobytes())
        out += _field(1, entry)
    if response.prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in response.prompt_logprobs]
        out += _field(2, np.asarray(values, "<f4").tobytes())
    if (top := response.topk_prompt_logprobs) is not None:
        cells = np.asarray([row or [_EMPTY_CELL] * k for row in top]).reshape(len(top), k, 2)
        ids, logprobs = cells[..., 0].astype("<i4"), cells[..., 1].astype("<f4")
        matrices = _field(1, ids.tobytes()) + _field(2, logprobs.tobytes())
        out += _field(3, matrices + _field(3, k) + _field(4, len(top)))
    return out
