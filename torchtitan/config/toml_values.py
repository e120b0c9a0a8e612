"""TOML tables become config sections: names are known and values have the declared types."""

import dataclasses
import difflib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.config.checks import ConfigError


def section_from_table(cls: type, table: Any, section: str = "") -> Any:
    """Build the config dataclass `cls` from a parsed TOML table; absent keys keep their defaults.

    section: dotted name of the table, "" for the whole file; it is named in errors.
    Raises ConfigError for an unknown key, a value of another type, or a value that the
    dataclass itself refuses.
    """
    if not isinstance(table, dict):
        raise ConfigError(
            f"{section} is a table of settings, got the single value {table!r}; "
            f"write [{section}] on a line of its own and its keys below it"
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _check_names(cls, table, section)

    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for name, value in table.items():
        key = f"{section}.{name}" if section else name
        if dataclasses.is_dataclass(hints[name]):
            values[name] = section_from_table(hints[name], value, key)
        else:
            values[name] = _typed(value, hints[name], section, fields[name])
    try:
        return cls(**values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"[{section or cls.__name__}] cannot be used: {error}") from error


def _check_names(cls: type, table: dict[str, Any], section: str) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    unknown = [name for name in table if name not in known]
    if not unknown:
        return
    lines = [
        f"Invalid field names in {cls} data: {set(unknown)}.",
        "Please modify your .toml config file or override these fields from the command line.",
        "Run `NGPU=1 ./run_train.sh --help` to read all valid fields.",
    ]
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        guess = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        where = f"[{section}]" if section else "the file"
        lines.append(f"{name!r} in {where} is unknown; {guess}")
    raise ConfigError("\n".join(lines))


def _typed(value: Any, annotation: Any, section: str, field: dataclasses.Field) -> Any:
    try:
        return convert(value, annotation)
    except TypeError as error:
        default = (
            "" if field.default is dataclasses.MISSING else f"; the default is {field.default!r}"
        )
        where = f"[{section}] {field.name}" if section else field.name
        raise ConfigError(f"{where} = {value!r}: {error}{default}") from None


def convert(value: Any, annotation: Any) -> Any:
    """Return `value`, as TOML knows it, as the type `annotation`; TypeError where it is another.

    TOML has no null and no tuples, and writes whole floats as integers: an integer serves for
    a float, a list for a tuple, text for a path. Types that TOML cannot write pass unchanged.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return convert(value, arguments[0])
    if origin in (Union, types.UnionType):
        return _convert_to_any_of(value, arguments)
    if origin is Literal:
        kinds = {type(choice) for choice in arguments}
        if value in arguments and type(value) in kinds:
            return value
        if type(value) in kinds:  # the caller's message shows the value
            raise TypeError(f"expected {describe(annotation)}")
    elif origin in (list, tuple) or annotation in (list, tuple):
        if isinstance(value, list):
            return _convert_items(value, origin or annotation, arguments)
    elif annotation is float:
        if _is_exactly(value, int, float):
            return float(value)
    elif annotation is Path:
        if isinstance(value, str):
            return Path(value)
    elif annotation in (bool, int, str):
        if _is_exactly(value, annotation):
            return value
    elif origin is dict or annotation is dict:
        if isinstance(value, dict):
            return value
    elif annotation is not type(None):
        return value
    raise TypeError(f"expected {describe(annotation)}, got {type(value).__name__}")


def _is_exactly(value: Any, *kinds: type) -> bool:
    # isinstance would let True pass as the integer 1.
    return type(value) in kinds


def _convert_to_any_of(value: Any, annotations: tuple[Any, ...]) -> Any:
    # An integer is tried as int before float makes 1.0 of it.
    for annotation in sorted(annotations, key=lambda a: a is float):
        try:
            return convert(value, annotation)
        except TypeError:
            continue
    names = " or ".join(describe(a) for a in annotations if a is not type(None))
    raise TypeError(f"expected {names}, got {type(value).__name__}")


def _convert_items(items: list[Any], kind: type, arguments: tuple[Any, ...]) -> Any:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise TypeError(f"expected {len(arguments)} items, got {len(items)}")
        return tuple(convert(item, a) for item, a in zip(items, arguments, strict=True))
    item_type = arguments[0] if arguments else Any
    return kind(convert(item, item_type) for item in items)


def describe(annotation: Any) -> str:
    """The type in words for an error message: `int`, `list[str]`, `one of "a", "b"`."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation)
