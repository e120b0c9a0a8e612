"""Converts TOML tables to config sections, and checks key names and value types."""

import dataclasses
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.config.checks.common import guess
from torchtitan.tools.errors import ConfigError


def with_values(instance: Any, table: Any, section: str = "") -> Any:
    """Return a copy of a dataclass instance with the values of a parsed TOML table.

    section: the table's dotted name in errors; "" for the whole file.
    Raises ConfigError for an unknown key, a value of the wrong type, or a value that the class refuses.
    """
    cls = type(instance)
    if not isinstance(table, dict):
        heading = f"[{section.partition('[')[0]}]" if section.endswith("]") else section
        raise ConfigError(
            f"{section} is a table of settings, got the single value {table!r}; "
            f"write [{heading}] on a line of its own and its keys below it"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in table if name not in known]:
        where = f"[{section}]" if section else "the file"
        sentence = "; ".join(
            f"{name!r} in {where} is unknown"
            + (guess(name, known) or f"; known are {', '.join(known)}")
            for name in unknown
        )
        text_of_0_2 = (
            f"Invalid field names in {cls} data: {set(unknown)}.\n"
            "Please modify your .toml config file or override these fields from the command line.\n"
            "Run `NGPU=1 ./run_train.sh --help` to read all valid fields.\n"
        )
        raise ConfigError(text_of_0_2 + sentence, sentence)

    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for name, value in table.items():
        current = getattr(instance, name)
        try:
            key = f"{section}.{name}" if section else name
            values[name] = convert(value, hints[name], key, current)
        except TypeError as error:
            where = f"[{section}] {name}" if section else name
            raise ConfigError(f"{where} = {value!r}: {error}; the default is {current!r}") from None
    try:
        return dataclasses.replace(instance, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"[{section or cls.__name__}] cannot be used: {error}") from error


def convert(value: Any, annotation: Any, key: str = "", current: Any = None) -> Any:
    """Return a TOML value as type `annotation`; raises TypeError for a value of the wrong type.

    Accepts an integer for a float, a list for a tuple, a string for a path. Other classes are not checked.
    key, current: the dotted name and the current value, for tables; see `with_values`.
    """
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    kind = type(value)  # isinstance would accept True as an integer
    accepted: dict[Any, tuple[Any, ...]] = {float: (int, float), Path: (str,), type(None): ()}
    accepted |= {plain: (plain,) for plain in (bool, int, str, dict)}
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return with_values(origin() if current is None else current, value, key)
    if origin is Annotated:
        return convert(value, arguments[0])
    if origin in (Union, types.UnionType):
        # Try float last, so 1 stays an integer.
        for member in sorted(arguments, key=lambda a: a is float):
            try:
                return convert(value, member, key, current)
            except TypeError:
                continue
    elif origin is Literal:
        kinds = {type(choice) for choice in arguments}
        if value in arguments and kind in kinds:
            return value
        if kind in kinds:  # the caller's message shows the value
            raise TypeError(f"expected {describe(annotation)}")
    elif origin in (list, tuple):
        if kind is list and origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                raise TypeError(f"expected {len(arguments)} items, got {len(value)}")
            return tuple(convert(item, a) for item, a in zip(value, arguments, strict=True))
        if kind is list:
            member = arguments[0] if arguments else Any
            return origin(convert(item, member, f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is dict and kind is dict and arguments:
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    elif origin not in accepted:
        return value
    elif kind in accepted[origin]:
        try:
            return value if kind is origin else origin(value)
        except OverflowError as error:
            raise TypeError("the number is too large") from error
    raise TypeError(f"expected {describe(annotation)}, got {kind.__name__}")


def describe(annotation: Any) -> str:
    """Return the type in words for an error message: `int`, `list[str]`, `one of "a", "b"`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments if a is not type(None))
    if origin is list and dataclasses.is_dataclass(arguments[0]):
        return "a list of tables, each under a heading in double brackets"
    return str(annotation) if arguments else getattr(annotation, "__name__", str(annotation))
