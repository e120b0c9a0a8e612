"""Tools for the policy to call: Python functions, their schemas, and calls in other processes.

A call has the form of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
The result of a call that fails is a string that begins with "error: ".
"""

import ast
import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchtitan.rl.function_pool import FunctionPool, Result
from torchtitan.tools.logging import logger

# The closing tag may be missing at the end: a stop string is not part of the text.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

_JSON_NAMES = "string", "integer", "number", "boolean", "array", "object"
_TYPES = dict(zip((str, int, float, bool, list, dict), _JSON_NAMES, strict=True))


@dataclass(frozen=True)
class ToolCall:
    """A call in the policy's text. problem: why the call is invalid; None for a valid call."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str | None = None


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in the policy's text, in order."""
    return [_parsed(call) for call in _CALL.findall(text)]


def _parsed(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"a call must be a JSON object, and this is not JSON: {error}")
    match call if not isinstance(call, dict) else {"arguments": {}} | call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    return ToolCall(problem='a call must be like {"name": "f", "arguments": {"x": 1}}')


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return a function's attribute `schema`, or a schema from its annotations; ValueError if invalid."""
    if hasattr(function, "schema"):
        # Suppress the errors of a `schema` that is not JSON.
        with suppress(TypeError, ValueError, RecursionError):
            match json.loads(json.dumps(function.schema)):
                case {"function": {"name": str(own_name), **others}} if own_name:
                    if isinstance(others.get("parameters", {}), dict):
                        return function.schema
        raise ValueError(
            f"rl.task.tools: the attribute `schema` of {name} must be a JSON object like "
            '{"type": "function", "function": {"name": "f", "parameters": {...}}}, got '
            f"{function.schema!r}; correct it, or take it out"
        )
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints.get(parameter.name)
        json_type = _TYPES.get(typing.get_origin(kind) or kind)
        if json_type is None or parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"rl.task.tools: the parameter {parameter.name!r} of {name} must not be positional-only "
                f"and must be annotated as {', '.join(t.__name__ for t in _TYPES)}, got {parameter}; "
                "correct it, or give the function a JSON schema in its attribute `schema`"
            )
        properties[parameter.name] = {"type": json_type}
        items = typing.get_args(kind)[:1]
        if json_type == "array" and items and items[0] in _TYPES:
            properties[parameter.name]["items"] = {"type": _TYPES[items[0]]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": function.__name__, "description": inspect.getdoc(function) or ""}
    return {"type": "function", "function": about | {"parameters": parameters}}


class Toolbox:
    """Functions that the policy may call, in separate processes.

    functions: name (module:function) -> function. n_processes: number of processes of this rank.
    timeout_seconds: time limit of one call.
    Raises ValueError for functions without a schema, or two functions of the same name.
    """

    def __init__(
        self, functions: dict[str, Callable[..., Any]], n_processes: int, timeout_seconds: float
    ):
        self.schemas = [schema_of(function, name) for name, function in functions.items()]
        self._names = [schema["function"]["name"] for schema in self.schemas]
        if len(set(self._names)) < len(self._names):
            raise ValueError(
                f"rl.task.tools must have different names, got {self._names}; rename one"
            )
        self._pool = FunctionPool(
            list(functions),
            n_processes,
            timeout_seconds,
            convert=as_text,
            what="the tool",
            keys=("rl.task.tools", "rl.task.tool_timeout_seconds"),
        )

    def results(self, calls: Sequence[ToolCall]) -> list[str]:
        """Return the calls' results as strings, in order."""
        # An invalid call has no name.
        known = [call for call in calls if call.name in self._names]
        numbers = [self._names.index(call.name) for call in known]
        results = iter(self._pool.call_all([((), call.arguments or {}) for call in known], numbers))
        names, texts = ", ".join(self._names), []
        for call in calls:
            if call.name in self._names:
                result = next(results)
            else:
                problem = call.problem or f"there is no tool {call.name!r}, only {names}"
                result = Result(error=problem)
            if result.failure is not None:
                logger.warning("%s; the policy gets this as the result", result.failure)
            problem = result.error or result.failure
            text = result.value if problem is None else f"error: {problem}"
            # A JSON escape can be a lone surrogate, which no tokenizer accepts.
            texts.append(text.encode(errors="replace").decode())
        return texts

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._pool.close()


def as_text(value: Any) -> str:
    """Return a function's result for the policy to read: a string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# AST nodes that `calculator` allows, besides numbers.
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub)
_ARITHMETIC += (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def calculator(expression: str) -> str:
    """Work out an arithmetic expression of numbers, + - * / // % and parentheses."""
    tree = ast.parse(expression.strip(), mode="eval")
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if not is_number and not isinstance(node, _ARITHMETIC):
            raise ValueError(f"an expression has numbers, + - * / // % and (), got {expression!r}")
    return str(eval(compile(tree, "expression", "eval")))
