"""Building blocks of config sections: `Section`, nested tables, and numbers with a range."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints


class Section:
    """A table of settings. `freeze` makes it read-only; copies of a frozen section can be changed."""

    __slots__ = ("_job",)  # `freeze` sets `_job`

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_job"):
            raise dataclasses.FrozenInstanceError(
                f"{type(self).__name__}.{name} = {value!r} cannot be set, because the config of a job "
                "stays as it was checked; build the job from a changed copy.deepcopy(job_config)"
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)  # raises if the section is frozen
        object.__delattr__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # omits `_job`, so copies are not frozen


def resolved_job(config: Any) -> Any:
    """Return the `job` that `freeze` stored in a config; None if the config is not frozen."""
    return getattr(config, "_job", None)


def freeze(config: Any, job: Any) -> None:
    """Make a section and its nested sections read-only. job: the object that `resolved_job` returns."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Section):
                freeze(part, job)
    object.__setattr__(config, "_job", job)


def section(kind: type, text: str = "") -> Any:
    """Return a field that is a nested table; `--help` prints `text` above its keys."""
    return dataclasses.field(default_factory=kind, metadata={"help": text})


class Setting(NamedTuple):
    key: str  # dotted name, such as "training.steps"
    value: Any
    annotation: Any
    default: Any


# Cached, because reading the type hints of all sections takes 2 ms, and several rules read them.
_hints_of: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(get_type_hints, include_extras=True)
)


def settings_of(config: Any, prefix: str = "", *, in_lists: bool = False) -> Iterator[Setting]:
    """Yield the settings of a section and its nested sections. in_lists: also settings like groups[0].lr."""
    hints = _hints_of(type(config))
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.", in_lists=in_lists)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Setting(key, value, hints[field.name], default)
        for i, part in enumerate(value if in_lists and isinstance(value, list) else ()):
            if isinstance(part, Section):
                yield from settings_of(part, f"{key}[{i}].", in_lists=True)


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a number, for the annotation of a setting.

    excluded: an end of the range that is not allowed. special: an allowed value outside the range.
    """

    smallest: float
    largest: float
    excluded: float | None = None
    special: float | None = None

    def problem(self, value: Any) -> str | None:
        """Return what the value must be, such as "at most 10", if it is not allowed; else None."""
        is_number = isinstance(value, numbers.Real)
        if not is_number:
            return "a number"
        # The condition states what is allowed, so nan fails, because all comparisons with nan are false.
        is_within = self.smallest <= value <= self.largest and value != self.excluded
        if is_within or value == self.special:
            return None
        limit, ends = self.smallest, ("at least", "above")
        if value >= self.largest:
            limit, ends = self.largest, ("at most", "below")
        besides = "" if self.special is None else f", or {self.special}"
        end = ends[1] if self.excluded == limit else ends[0]
        return f"{end} {limit}{besides}"


Positive = Annotated[int, Range(1, 10**9)]
NumSteps = Annotated[int, Range(1, 10**12)]
Count = Annotated[int, Range(0, 10**9)]
PositiveFloat = Annotated[float, Range(0, 10**9, excluded=0)]
NotNegative = Annotated[float, Range(0, 1e38)]  # the largest fp32 number is 3e38
Fraction = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, excluded=1)]  # decay of a moving average
