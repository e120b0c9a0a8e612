"""Answers to requests, and the parsing of requests' JSON; errors name the wrong value."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from torchtitan.integrations.tinker.types import AdamParams, ModelInput, SamplingParams

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}"
_PATH = re.compile(rf"tinker://({_NAME})/(weights|sampler_weights|external_weights)/({_NAME})")
_KINDS: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Answer:
    """The answer to a request: JSON values, or instead a protobuf message or a file."""

    values: Any = None
    status: int = 200
    protobuf: bytes | None = None
    file: str | None = None


class Refused(ValueError):
    """The request is refused. status: the HTTP status of the answer."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def read_json(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body, parse_constant=_finite, parse_float=_finite) if body else {}
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise Refused(f"the request must be a JSON object, got {type(values).__name__}")
    return values


def _finite(text: str) -> float:
    """Parse a number; raise ValueError for NaN and infinity, which JSON answers cannot hold."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"numbers must be finite, got {text[:40]}")
    return number


def take(values: dict[str, Any], key: str, kind: type, default: Any = ...) -> Any:
    """Return the value of `key`, or `default` if missing or null. Raises Refused for another type."""
    value = values.get(key)
    if value is None:
        if default is ...:
            raise Refused(f"the request needs {key}, which must be {_KINDS[kind]}, got none")
        return default
    is_number = kind is float and type(value) is int and abs(value) < 2**63
    if type(value) is not kind and not is_number:
        raise Refused(f"{key} must be {_KINDS[kind]}, got {_short(value)}")
    if kind is int and not -(2**63) <= value < 2**63:
        raise Refused(f"{key} must have at most 64 bits, got {_short(value)}")
    return value


def _take_number(values: dict[str, Any], key: str, default: float) -> float:
    """Return a number, or the default. Null is refused: clients send NaN and infinity as null."""
    if key in values and values[key] is None:
        raise Refused(f"{key} must be a finite number, got null, which stands for NaN; correct it")
    return take(values, key, float, default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def folder_of(path: str) -> str:
    """Return the folder of a tinker:// path, relative to the server's folder of states."""
    match = _PATH.fullmatch(path)
    if match is None:
        name = "tinker://<model id>/weights/<name>, or the path that another save returned"
        raise Refused(f"a saved state is {name}, got {_short(path)}")
    return "/".join(match.groups())


def model_input(values: dict[str, Any], key: str) -> ModelInput:
    tokens: list[int] = []
    for chunk in take(take(values, key, dict), "chunks", list):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else chunk
        if kind != "encoded_text":
            raise Refused(f"{key} must be chunks of encoded_text, got {_short(kind)}; leave it out")
        tokens += take(chunk, "tokens", list)
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise Refused(f"{key} must be at least one token id, got {_short(tokens)}")
    return ModelInput.from_ints(tokens)


def adam_params(values: dict[str, Any]) -> AdamParams:
    if (other := values.get("optimizer_params")) is not None:
        raise Refused(f"the optimizer is AdamW, got {_short(other)}; send adam_params")
    params = take(values, "adam_params", dict)
    names = AdamParams.__dataclass_fields__
    return AdamParams(**{name: _take_number(params, name, names[name].default) for name in names})


def sampling_params(values: dict[str, Any], room: int) -> SamplingParams:
    """Parse `sampling_params`; the caller checks ranges. room: the default of `max_tokens`."""
    params = take(values, "sampling_params", dict)
    stop = params.get("stop")
    is_list = isinstance(stop, list) and all(type(s) in (str, int) for s in stop)
    if not is_list and not isinstance(stop, str | None):
        raise Refused(
            f"stop must be a string, or a list of strings or token ids, got {_short(stop)}"
        )
    return SamplingParams(
        max_tokens=take(params, "max_tokens", int, room),
        temperature=_take_number(params, "temperature", 1.0),
        top_k=take(params, "top_k", int, -1),
        top_p=_take_number(params, "top_p", 1.0),
        stop=tuple(stop) if isinstance(stop, list) else stop,
        seed=take(params, "seed", int, None),
    )
