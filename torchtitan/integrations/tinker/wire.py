"""The protobuf messages of Tinker's interface, with names and field numbers of the tinker client 0.38.0.

forward_backward requests, their results, and the results of sampling are protobuf; everything else
is JSON.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from torchtitan.integrations.tinker.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampleResponse,
)

_FLOAT32 = 1
_DTYPES = {_FLOAT32: "<f4", 2: "<i8", 3: "<i4"}  # DType number in messages -> numpy dtype
_STOP_REASONS = {"stop": 0, "length": 1}
_EMPTY_CELL = 0, -99999.0  # token id and log-prob that stand for None
# Limit for the number of fields of a request and of its Datums (chunks and loss inputs) together.
MOST_ENTRIES = 2**18

# Message -> its fields, numbered from 1; "*" marks a repeated field. As in protobuf, map entries are messages.
_FIELDS = {
    "ForwardBackwardRequest": "model_id:string seq_id:int32 data:Datum* loss_fn:string "
    "loss_fn_config:Number* forward_only:bool loss_fn_config_v2:Setting*",
    "Datum": "model_input:Chunk* loss_fn_inputs:LossInput*",
    "Chunk": "encoded_text:Text",
    "Text": "tokens:bytes",
    "LossInput": "key:string value:Tensor",
    "Tensor": "dense:bytes sparse_csr:bytes dtype:int32 shape:int64*",
    "Setting": "key:string value:SettingValue",
    "SettingValue": "number:double text:string",
    "Number": "key:string value:double",
    "ForwardBackwardOutput": "loss_fn_output_type:string loss_fn_outputs:Record* metrics:Number*",
    "Record": "type_tag:string fields:RecordField* num_datums:int64",
    "RecordField": "key:string value:BatchedTensor",
    "BatchedTensor": "data:bytes offsets:bytes dtype:int32",
    "SampleResponse": "sequences:Sequence* prompt_logprobs:bytes topk_prompt_logprobs:TopK",
    "Sequence": "stop_reason:int32 tokens:bytes logprobs:bytes",
    "TopK": "token_ids:bytes logprobs:bytes k:uint32 length:uint32",
}


def _message_classes() -> dict[str, Any]:
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker.proto", package="tinker", syntax="proto2"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields.split(), start=1):
            key, _, kind = field.partition(":")
            label = field_type.LABEL_REPEATED if "*" in kind else field_type.LABEL_OPTIONAL
            added, kind = message.field.add(name=key, number=number, label=label), kind.rstrip("*")
            if kind in _FIELDS:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".tinker.{kind}"
            else:
                added.type = getattr(field_type, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"tinker.{name}")) for name in _FIELDS}


_MESSAGES = _message_classes()


# ---- reading ----


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """A forward_backward request. problem: why the request's data cannot be used, or None."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float]
    forward_only: bool
    problem: str | None = None


def read_forward_backward(body: bytes, check_model: Callable[[str], Any]) -> ForwardBackwardRequest:
    """Parse a request. check_model: called with the model's id before any data are converted.

    Raises ValueError for bytes that are not a request, and any exception of check_model.
    """
    # Count entries before parsing, because parsing takes up to 20 times the memory of the bytes.
    entries = itertools.islice(_entries(memoryview(body)), MOST_ENTRIES + 1)
    if sum(1 for _ in entries) > MOST_ENTRIES:
        what = "Datums, chunks and loss inputs together"
        raise ValueError(f"a request may have {MOST_ENTRIES} {what}; send less at once")
    try:
        message = _MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise ValueError(f"the request is not a message of the tinker client: {error}") from error
    check_model(message.model_id)
    data: list[Datum] = []
    config, problem = {}, None
    try:
        config = {setting.key: setting.value for setting in message.loss_fn_config}
        for setting in message.loss_fn_config_v2:
            if setting.value.HasField("text"):
                got = f"{setting.key} = {setting.value.text!r}"
                raise ValueError(f"loss_fn_config takes numbers, got {got}")
            config[setting.key] = setting.value.number
        for datum in message.data:
            data.append(_datum(datum))
    except ValueError as error:
        problem = f"{error} (datum {len(data)})"
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss_fn=message.loss_fn,
        loss_fn_config=config,
        forward_only=message.forward_only,
        problem=problem,
    )


def _entries(request: memoryview) -> Iterator[Any]:
    """Yield the fields of a request and of its Datums."""
    for number, content in _fields(request):
        yield content
        if number == 3:
            yield from _fields(content)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (number, content) of each field up to the first malformed field; a varint's content is empty."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 70, 7):
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
        return value

    with contextlib.suppress(IndexError):
        while place < len(message):
            number, kind = divmod(varint(), 8)
            if kind == 0:
                varint()
            length = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, 0)
            yield number, message[place : place + length]
            place += length


def _datum(message: Any) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("a Datum's input must be text tokens, got an image or audio")
        tokens += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    inputs = {}
    for entry in message.loss_fn_inputs:
        tensor, shape = entry.value, list(entry.value.shape[:4])
        if tensor.HasField("sparse_csr") or len(shape) > 1 or tensor.dtype not in _DTYPES:
            raise ValueError(
                "loss_fn_inputs hold one number per token, float32 or int64 and not sparse, got "
                f"{entry.key} of shape {shape}; several targets per token are not supported"
            )
        inputs[entry.key] = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).copy()
    return Datum(ModelInput.from_ints(tokens), inputs)


# ---- writing ----


def write_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """Return a ForwardBackwardOutput message with the log-probs [n] of each datum, as float32."""
    logprobs = [np.asarray(datum["logprobs"].cpu(), "<f4") for datum in output.loss_fn_outputs]
    message = _MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    tensor = record.fields.add(key="logprobs").value
    tensor.data = b"".join(values.tobytes() for values in logprobs)
    tensor.offsets = np.cumsum([0, *(values.nbytes for values in logprobs)]).astype("<i8").tobytes()
    tensor.dtype = _FLOAT32
    for name, value in output.metrics.items():
        if math.isfinite(value):
            # The suffix tells clients how to reduce a metric over several requests.
            suffix = "" if ":" in name else ":max" if name.endswith("_max") else ":mean"
            message.metrics.add(key=name + suffix, value=value)
    return message.SerializeToString()


def write_samples(response: SampleResponse, k: int) -> bytes:
    """Return a SampleResponse message. A log-prob None becomes NaN; top tokens None become k empty cells."""
    message = _MESSAGES["SampleResponse"]()
    for sequence in response.sequences:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(response.prompt_logprobs, "<f4").tobytes()
    if (rows := response.topk_prompt_logprobs) is not None:
        cells = np.asarray([row or [_EMPTY_CELL] * k for row in rows]).reshape(len(rows), k, 2)
        top = message.topk_prompt_logprobs
        top.token_ids, top.logprobs = (
            cells[..., i].astype(t).tobytes() for i, t in enumerate(("<i4", "<f4"))
        )
        top.k, top.length = k, len(rows)
    return message.SerializeToString()
