"""Read what a run has left in its folder: metrics, events, samples.

The folder may belong to a run that is going on, to one that was killed in the middle of a line,
or to somebody else: whatever is not as it should be is passed over, nothing in it is trusted, and
files that links lead out of the folder to are not read.
"""

import contextlib
import json
import math
import os
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.tools.events import FILE_NAME as EVENTS_FILE

EPISODES_FILE = "episodes.jsonl"
SAMPLED_STEPS = 8  # of which samples are shown
SAMPLES_PER_STEP = 6
_LONGEST_LINE = 1 << 22  # bytes
_LARGEST = 1e15  # of a step, and of seconds since 1970


class NoRunError(Exception):
    """The folder holds no run; the message says what was looked for."""


@dataclass
class Curve:
    """One metric's points in the order in which they were logged, column by column.

    starts: which start of the run logged the point, counted from 0.
    """

    starts: array = field(default_factory=lambda: array("q"))
    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("d"))  # Unix seconds
    values: array = field(default_factory=lambda: array("d"))

    def append(self, start: int, step: int, time: float, value: float) -> None:
        for column, entry in zip(self.columns(), (start, step, time, value), strict=True):
            column.append(entry)

    def columns(self) -> tuple[array, array, array, array]:
        return self.starts, self.steps, self.times, self.values


@dataclass
class Run:
    folder: Path
    curves: dict[str, Curve]
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    source: str  # where the curves come from

    def longest_curve(self) -> Curve:
        """The metric with the most points; an empty curve without metrics."""
        return max(self.curves.values(), key=lambda curve: len(curve.steps), default=Curve())

    def first_steps(self) -> dict[int, int]:
        """start -> the lowest step that it logged."""
        first: dict[int, int] = {}
        for curve in self.curves.values():
            for start, step in zip(curve.starts, curve.steps, strict=True):
                first[start] = min(step, first.get(start, step))
        return first


def read_run(folder: Path) -> Run:
    """Raises NoRunError for a folder without a run."""
    if not folder.is_dir():
        raise NoRunError(f"{folder} is not a folder; name the job.dump_folder of a run")
    events = [_event(record) for record in _records(_inside(folder, [folder / EVENTS_FILE]))]
    events = [event for event in events if event is not None]
    start_times = sorted(e["wall_time"] for e in events if e["kind"] == "start")
    curves, source = _curves_of_jsonl(folder, start_times)
    if not curves:
        curves, source = _curves_of_tensorboard(folder)
    samples = _samples(_inside(folder, [folder / EPISODES_FILE]))
    if not (curves or events or samples):
        raise NoRunError(
            f"{folder} holds no run: there is no {EVENTS_FILE}, no file of metrics (*.jsonl with "
            f"`step` and `wall_time`), no TensorBoard file (events.out.tfevents.*) and no "
            f"{EPISODES_FILE} in it; name the job.dump_folder of a run"
        )
    return Run(folder, curves, events, samples, source)


# ---- lines ----


def _inside(folder: Path, paths: Iterable[Path]) -> list[Path]:
    root = folder.resolve()
    return [path for path in paths if path.is_file() and path.resolve().is_relative_to(root)]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset, object) of each line that holds a JSON object."""
    with open(path, "rb") as file:
        offset = 0
        while line := file.readline(_LONGEST_LINE):
            record = _object(line)
            if record is not None:
                yield offset, record
            offset += len(line)


def _object(line: bytes) -> dict[str, Any] | None:
    # Cut off, of other bytes, or nested deeper than Python follows.
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def _records(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    return (record for path in paths for _, record in _lines(path))


def number(value: Any) -> float | None:
    """A float of a JSON number, or of "NaN", "Infinity", "-Infinity"; None of anything else."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def _place(record: dict[str, Any]) -> tuple[int, float] | None:
    """(step, wall time) of a line of metrics."""
    step, time = number(record.get("step")), number(record.get("wall_time"))
    if step is None or time is None or not (0 <= step < _LARGEST and 0 <= time < _LARGEST):
        return None
    return int(step), time


def _event(record: dict[str, Any]) -> dict[str, Any] | None:
    time, step = number(record.get("wall_time")), number(record.get("step"))
    if time is None or not 0 <= time < _LARGEST:
        return None
    event = {**record, "wall_time": time, "step": None}
    if step is not None and 0 <= step < _LARGEST:
        event["step"] = int(step)
    event["kind"] = str(record.get("kind", "?"))
    event["message"] = str(record.get("message", ""))
    return event


# ---- curves ----


class _Starts:
    """Tells which start of the run a line belongs to: each begins after its time, and with no
    step that was logged before."""

    def __init__(self, start_times: list[float]) -> None:
        self.start_times = start_times
        self._start, self._known_start = 0, None
        self._step, self._keys = -1, set()

    def start_of(self, step: int, time: float, keys: set[str]) -> int:
        known_start = bisect_right(self.start_times, time)
        is_repeated = step < self._step or (step == self._step and bool(keys & self._keys))
        if self._known_start is not None and (known_start != self._known_start or is_repeated):
            self._start += 1
            self._keys = set()
        self._keys = keys | self._keys if step == self._step else keys
        self._step, self._known_start = step, known_start
        return self._start


def _curves_of_jsonl(folder: Path, start_times: list[float]) -> tuple[dict[str, Curve], str]:
    """Of the files of several ranks, the first one's; `metrics.save_jsonl_file` may name it."""
    paths = _inside(folder, sorted(folder.glob("*.jsonl"), key=_natural))
    paths.sort(key=lambda path: path.name != "metrics.jsonl")
    for path in paths:
        if path.name in (EVENTS_FILE, EPISODES_FILE):
            continue
        curves: dict[str, Curve] = defaultdict(Curve)
        starts = _Starts(start_times)
        for _, record in _lines(path):
            place = _place(record)
            if place is None:
                continue
            values = {key: number(record[key]) for key in record.keys() - {"step", "wall_time"}}
            start = starts.start_of(*place, set(values))
            for key, value in values.items():
                if value is not None:
                    curves[key].append(start, *place, value)
        if curves:
            return dict(sorted(curves.items())), path.name
    return {}, ""


def _curves_of_tensorboard(folder: Path) -> tuple[dict[str, Curve], str]:
    """Each start of a run writes a file of its own; one that grows is read as far as it goes."""
    paths = _inside(folder, folder.rglob("events.out.tfevents.*"))
    if not paths:
        return {}, ""
    import logging

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    curves: dict[str, Curve] = defaultdict(Curve)
    for start, path in enumerate(sorted(_of_first_rank(paths), key=_time_of)):
        file = EventAccumulator(str(path), {"scalars": 0}, purge_orphaned_data=False)
        with contextlib.suppress(Exception):  # damaged in any way that protobuf can tell
            file.Reload()
        for tag in file.Tags()["scalars"]:
            for point in file.Scalars(tag):
                place = _place({"step": point.step, "wall_time": point.wall_time})
                if place is not None:
                    curves[tag].append(start, *place, point.value)
    return dict(sorted(curves.items())), "TensorBoard files"


def _of_first_rank(paths: list[Path]) -> list[Path]:
    def rank(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"(?:rank|replica)_(\d{1,9})", str(path))]

    first = min(map(rank, paths))
    return [path for path in paths if rank(path) == first]


def _time_of(path: Path) -> tuple[int, str]:
    """From the name: events.out.tfevents.<Unix seconds>.<host>.<pid>.<count>"""
    seconds = path.name.split(".")[3]
    return int(seconds) if seconds.isdecimal() and len(seconds) < 16 else 0, str(path)


def _natural(path: Path) -> list[Any]:
    """A sort key: rank_2 comes before rank_10."""
    parts = re.split(r"(\d+)", path.name)
    return [part.zfill(20) if part.isdecimal() else part for part in parts]


# ---- samples ----


def _samples(paths: list[Path]) -> list[dict[str, Any]]:
    """The first samples of some steps, the first and the last among them, newest step first.

    Of a step that was done twice, those of the second time.
    """
    if not paths:
        return []
    offsets: dict[int, int] = {}  # step -> where its lines begin
    last_step = None
    for offset, record in _lines(paths[0]):
        step = number(record.get("step"))
        if step is not None and 0 <= step < _LARGEST:
            if step != last_step:
                offsets[int(step)] = offset
            last_step = step
    samples = []
    with open(paths[0], "rb") as file:
        for step in reversed(spread(sorted(offsets), SAMPLED_STEPS)):
            file.seek(offsets[step], os.SEEK_SET)
            for _ in range(SAMPLES_PER_STEP):
                record = _object(file.readline(_LONGEST_LINE))
                if record is None or number(record.get("step")) != step:
                    break
                samples.append({**record, "step": step})
    return samples


def spread(items: list[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, at equal distances, the first and the last among them."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


# ---- fewer points ----


def thin_out(values: Iterable[float], limit: int) -> list[int]:
    """Indices of at most `limit` points that look like all of them.

    Kept are the first, the last, and of each of equal stretches the smallest, the largest and the
    first that is not finite.
    """
    values = list(values)
    n = len(values)
    if n <= limit:
        return list(range(n))
    num_stretches = max(1, (limit - 2) // 3)
    kept = {0, n - 1} if limit >= 2 else set()
    for i in range(num_stretches):
        stretch = range(i * n // num_stretches, (i + 1) * n // num_stretches)
        finite = [j for j in stretch if math.isfinite(values[j])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(stretch):
            kept.add(next(j for j in stretch if not math.isfinite(values[j])))
    return sorted(kept)[:limit]
