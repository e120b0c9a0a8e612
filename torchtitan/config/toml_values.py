"""TOML tables become config sections, after a check of their names and of their values' types."""

import dataclasses
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.config.checks.common import guess
from torchtitan.tools.errors import ConfigError


def section_from_table(cls: type, table: Any, section: str = "") -> Any:
    """Build the config dataclass `cls` from a parsed TOML table; absent keys keep their defaults.

    section: the table's dotted name for errors, "" for the whole file.
    Raises ConfigError for an unknown key, a value of another type, or one that `cls` refuses.
    """
    if not isinstance(table, dict):
        heading = f"[{section.partition('[')[0]}]" if section.endswith("]") else section
        raise ConfigError(
            f"{section} is a table of settings, got the single value {table!r}; "
            f"write [{heading}] on a line of its own and its keys below it"
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = [name for name in table if name not in fields]
    if unknown:
        where = f"[{section}]" if section else "the file"
        sentence = "; ".join(
            f"{name!r} in {where} is unknown"
            + (guess(name, fields) or f"; known are {', '.join(fields)}")
            for name in unknown
        )
        reference_text = (
            f"Invalid field names in {cls} data: {set(unknown)}.\n"
            "Please modify your .toml config file or override these fields from the command line.\n"
            "Run `NGPU=1 ./run_train.sh --help` to read all valid fields.\n"
        )
        raise ConfigError(reference_text + sentence, sentence)

    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for name, value in table.items():
        key = f"{section}.{name}" if section else name
        if dataclasses.is_dataclass(hints[name]):
            values[name] = section_from_table(hints[name], value, key)
        elif _is_list_of_tables(hints[name]) and type(value) is list:
            (kind,) = get_args(hints[name])
            tables = enumerate(value)
            values[name] = [section_from_table(kind, part, f"{key}[{i}]") for i, part in tables]
        else:
            where = f"[{section}] {name}" if section else name
            values[name] = _checked(value, hints[name], where, fields[name].default)
    try:
        return cls(**values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"[{section or cls.__name__}] cannot be used: {error}") from error


def with_values(instance: Any, table: Any, section: str) -> Any:
    """Return a copy of a dataclass instance with the fields that `table` names changed.

    A field that is a dataclass takes a table of its own. section: the table's dotted name for errors.
    Raises ConfigError for an unknown field or a value of another type.
    """
    cls = type(instance)
    hints = get_type_hints(cls, include_extras=True)
    if not isinstance(table, dict):
        raise ConfigError(f"{section} is a table of fields of {cls.__name__}, got {table!r}")
    values = {}
    for name, value in table.items():
        if name not in hints:
            known = [field.name for field in dataclasses.fields(cls)]
            hint = guess(name, known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"{section}.{name} is not a field of {cls.__name__}{hint}")
        members: tuple[Any, ...] = (hints[name], *get_args(hints[name]))
        kinds: list[Any] = [kind for kind in members if dataclasses.is_dataclass(kind)]
        if kinds:
            current = getattr(instance, name)
            values[name] = with_values(current or kinds[0](), value, f"{section}.{name}")
        else:
            where, default = f"{section}.{name}", getattr(instance, name)
            values[name] = _checked(value, hints[name], where, default)
    return dataclasses.replace(instance, **values)


def _checked(value: Any, annotation: Any, where: str, default: Any) -> Any:
    """Return `convert(value, annotation)`; a ConfigError names the key, `where`, and its default."""
    try:
        return convert(value, annotation)
    except TypeError as error:
        remedy = "" if default is dataclasses.MISSING else f"; the default is {default!r}"
        raise ConfigError(f"{where} = {value!r}: {error}{remedy}") from None


def convert(value: Any, annotation: Any) -> Any:
    """Return a TOML value as the type `annotation`; raises TypeError if it is of another type.

    An integer is accepted for a float, a list for a tuple, text for a path. Values of types that
    TOML cannot write are returned unchanged.
    """
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    kind = type(value)  # isinstance would let True pass as the integer 1
    expected = describe(annotation)
    accepted: dict[Any, tuple[Any, ...]] = {float: (int, float), Path: (str,), type(None): ()}
    accepted |= {plain: (plain,) for plain in (bool, int, str, dict)}
    if origin is Annotated:
        return convert(value, arguments[0])
    if origin in (Union, types.UnionType):
        # int before float, so that 1 stays an integer.
        for member in sorted(arguments, key=lambda a: a is float):
            try:
                return convert(value, member)
            except TypeError:
                continue
        expected = " or ".join(describe(a) for a in arguments if a is not type(None))
    elif origin is Literal:
        kinds = {type(choice) for choice in arguments}
        if value in arguments and kind in kinds:
            return value
        if kind in kinds:  # the caller's message shows the value
            raise TypeError(f"expected {expected}")
    elif origin in (list, tuple):
        if kind is list and origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                raise TypeError(f"expected {len(arguments)} items, got {len(value)}")
            return tuple(convert(item, a) for item, a in zip(value, arguments, strict=True))
        if kind is list:
            return origin(convert(item, arguments[0] if arguments else Any) for item in value)
    elif origin is dict and kind is dict and arguments:
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    elif origin not in accepted:
        return value
    elif kind in accepted[origin]:
        try:
            return value if kind is origin else origin(value)
        except OverflowError as error:
            raise TypeError("the number is too large") from error
    raise TypeError(f"expected {expected}, got {kind.__name__}")


def describe(annotation: Any) -> str:
    """Return the type in words for an error message: `int`, `list[str]`, `one of "a", "b"`."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if _is_list_of_tables(annotation):
        return "a list of tables, each under a heading in double brackets"
    return str(annotation)


def _is_list_of_tables(annotation: Any) -> bool:
    return get_origin(annotation) is list and dataclasses.is_dataclass(get_args(annotation)[0])
