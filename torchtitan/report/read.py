"""Read the metrics, events and samples in a run's folder.

The run may still write, or may have been killed in the middle of a line, and the folder may come from
a stranger: damaged lines are skipped, contents are not trusted, and links out of the folder are not
followed.
"""

import contextlib
import json
import math
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.tools.events import FILE_NAME as EVENTS_FILE
from torchtitan.tools.files import open_file

EPISODES_FILE = "episodes.jsonl"
SAMPLED_STEPS = 8  # number of steps whose samples are shown
SAMPLES_PER_STEP = 6
# In bytes.
_LONGEST_LINE = 1 << 22
# Times are seconds since 1970.
_MAX_STEP_OR_TIME = 1e15


class NoRunError(Exception):
    """The folder holds no run; the message names the files that a run has."""


class Curve:
    """One metric's points in the order in which they were logged, column by column.

    starts: for each point, the index of the run's start or restart that logged it. times: Unix seconds.
    """

    def __init__(self) -> None:
        self.starts, self.steps, self.times, self.values = map(array, "qqdd")

    def append(self, *point: float) -> None:
        for column, entry in zip(vars(self).values(), point, strict=True):
            column.append(entry)


@dataclass
class Run:
    folder: Path
    curves: dict[str, Curve]
    events: list[dict[str, Any]]  # in order of time
    samples: list[dict[str, Any]]
    source: str  # name of the file with the curves

    def points(self) -> dict[int, list[tuple[int, float]]]:
        """Return, for each start of the run, the sorted (step, time) at which that start logged metrics."""
        found: set[tuple[int, int, float]] = set()
        for curve in self.curves.values():
            found.update(zip(curve.starts, curve.steps, curve.times, strict=True))
        points = defaultdict(list)
        for start, *point in sorted(found):
            points[start].append(tuple(point))
        return points

    def first_steps(self) -> dict[int, int]:
        """Return start -> its first step: the step after its event "training", or the lowest logged step."""
        first, ended = {}, -math.inf
        for start, points in self.points().items():
            began = [
                event["step"] + 1
                for event in self.events
                if event["kind"] == "training"
                and ended < event["wall_time"] <= points[0][1]
                and event["step"] is not None
            ]
            first[start] = min([*began[-1:], points[0][0]])
            ended = points[-1][1]
        return first


def read_run(folder: Path) -> Run:
    """Return the run in a folder. Raises NoRunError for a folder without a run."""
    if not folder.is_dir():
        raise NoRunError(f"{folder} is not a folder; name the job.dump_folder of a run")
    events = []
    for path in _inside(folder, [folder / EVENTS_FILE]):
        for _, record in _lines(path):
            time, step = number(record.get("wall_time")), number(record.get("step"))
            if _fits(time):
                kind, message = str(record.get("kind", "?")), str(record.get("message", ""))
                place = {"wall_time": time, "step": int(step) if _fits(step) else None}
                events.append({**record, **place, "kind": kind, "message": message})
    events.sort(key=lambda event: event["wall_time"])
    curves, source = _curves(folder, [e["wall_time"] for e in events if e["kind"] == "start"])
    samples = _samples(_inside(folder, [folder / EPISODES_FILE]))
    if not (curves or events or samples):
        raise NoRunError(
            f"{folder} holds no run: there is no {EVENTS_FILE}, no file of metrics (*.jsonl with "
            f"`step` and `wall_time`) and no {EPISODES_FILE} in it; name the job.dump_folder of a run"
        )
    return Run(folder, dict(sorted(curves.items())), events, samples, source)


def number(value: Any) -> float | None:
    """Return a JSON number, or "NaN", "Infinity" or "-Infinity", as float; None for other values."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def _fits(value: float | None) -> bool:
    """Return True for a possible step or time."""
    return value is not None and 0 <= value < _MAX_STEP_OR_TIME


def _inside(folder: Path, paths: Iterable[Path]) -> list[Path]:
    root = folder.resolve()
    return [path for path in paths if path.is_file() and path.resolve().is_relative_to(root)]


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset, object) of each line, from `offset` on, that holds a JSON object."""
    with open_file(path, "rb") as file:
        file.seek(offset)
        while line := file.readline(_LONGEST_LINE):
            # A line may be cut off, not text, or nested too deep for Python.
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield offset, record
            offset += len(line)


# ---- curves ----


def _curves(folder: Path, start_times: list[float]) -> tuple[dict[str, Curve], str]:
    """Return (curves, file name) of the first file with metrics, which is the lowest rank's."""

    def order(path: Path) -> tuple[bool, list[str]]:  # sort rank_2 before rank_10
        parts = re.split(r"(\d+)", path.name)
        return path.name != "metrics.jsonl", [p.zfill(20) if p.isdecimal() else p for p in parts]

    for path in sorted(_inside(folder, folder.glob("*.jsonl")), key=order):
        if path.name in (EVENTS_FILE, EPISODES_FILE):
            continue
        curves: dict[str, Curve] = defaultdict(Curve)
        # A new start begins when the time passes a start event, or when a step is logged again.
        start, known_start, last_step, seen = 0, None, -1, set()
        for _, record in _lines(path):
            step, time = number(record.pop("step", None)), number(record.pop("wall_time", None))
            if not (_fits(step) and _fits(time)):
                continue
            step, known, keys = int(step), bisect_right(start_times, time), set(record)
            is_repeated = step < last_step or (step == last_step and not seen.isdisjoint(keys))
            if known_start is not None and (known != known_start or is_repeated):
                start, seen = start + 1, set()
            seen = keys | seen if step == last_step else keys
            last_step, known_start = step, known
            for key, entry in record.items():
                value = number(entry)
                if value is not None:
                    curves[key].append(start, step, time, value)
        if curves:
            return curves, path.name
    return {}, ""


# ---- samples ----


def _samples(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the first samples of up to SAMPLED_STEPS steps, newest step first.

    The first and the last step are among them. A step that was redone shows its latest samples.
    """
    offsets: dict[int, int] = {}  # step -> offset of its first line
    samples, last_step = [], None
    for path in paths:
        for offset, record in _lines(path):
            step = number(record.get("step"))
            if _fits(step):
                if step != last_step:
                    offsets[int(step)] = offset
                last_step = step
        for step in reversed(spread(sorted(offsets), SAMPLED_STEPS)):
            for count, (_, record) in enumerate(_lines(path, offsets[step])):
                if count == SAMPLES_PER_STEP or number(record.get("step")) != step:
                    break
                samples.append({**record, "step": step})
    return samples


# ---- fewer points ----


def spread(items: list[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced items, including the first and the last."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def thin_out(values: Iterable[float], limit: int) -> list[int]:
    """Return indices of at most `limit` points whose curve looks like that of all points.

    Keeps both ends and, from each of several equal stretches, the smallest, largest and first non-finite value.
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
