"""What the config's sections are made of: `Section`, nested tables, and types with a range."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints


class Section:
    """A table of settings. `freeze` ends its changes; a copy of it can be changed again."""

    __slots__ = ("_job",)  # what froze it

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_job"):
            raise dataclasses.FrozenInstanceError(
                f"{type(self).__name__}.{name} = {value!r} cannot be set, because the config of a job "
                "stays as it was checked; build the job from a changed copy.deepcopy(job_config)"
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)  # refused if it is frozen
        object.__delattr__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # of copies, which are not frozen


def resolved_job(config: Any) -> Any:
    """Return what `torchtitan.job.resolve_job` made of a config; None if it can still be changed."""
    return getattr(config, "_job", None)


def freeze(config: Any, job: Any) -> None:
    """Refuse changes of a section and the sections in it from here on. job: see `resolved_job`."""
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
    key: str  # dotted
    value: Any
    annotation: Any
    default: Any


# Each rule about all settings reads the hints of all sections, which takes 2 ms.
_hints_of: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(get_type_hints, include_extras=True)
)


def settings_of(config: Any, prefix: str = "", *, in_lists: bool = False) -> Iterator[Setting]:
    """Yield the settings of a section and those inside it; in_lists: also optimizer.groups[0].lr."""
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
    """The values that a number may have; stands in the annotation of a setting.

    excluded: an end of the range that is not part of it. special: a value outside that is allowed.
    """

    smallest: float
    largest: float
    excluded: float | None = None
    special: float | None = None

    def problem(self, value: Any) -> str | None:
        """Return what a value outside must be, such as "at most 10"; None for a value inside."""
        is_number = isinstance(value, numbers.Real)
        if value == self.special or not is_number:
            return "a number" if not is_number else None
        # Comparisons with nan are false, so the condition states what is allowed: nan then fails.
        if self.smallest <= value <= self.largest and value != self.excluded:
            return None
        besides = "" if self.special is None else f", or {self.special}"
        if value >= self.largest:
            end = "below" if self.excluded == self.largest else "at most"
            return f"{end} {self.largest}{besides}"
        end = "above" if self.excluded == self.smallest else "at least"
        return f"{end} {self.smallest}{besides}"


Positive = Annotated[int, Range(1, 10**9)]
NumSteps = Annotated[int, Range(1, 10**12)]
Count = Annotated[int, Range(0, 10**9)]
PositiveFloat = Annotated[float, Range(0, 10**9, excluded=0)]
NotNegative = Annotated[float, Range(0, 1e38)]  # fp32 holds 3e38
Fraction = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, excluded=1)]  # of an average
