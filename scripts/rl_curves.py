"""Draws what RL runs logged, as one SVG, and prints a table of how they began and ended.

    python scripts/rl_curves.py --out docs/rl_curves.svg \\
        "copy 3 letters=outputs/rl/copy_cpu/seed_*" "sum of 2 digits=outputs/rl/sum_digits_cpu/seed_*"

Each argument is one panel: a title, and a pattern of dump folders, one line each. Read from a
folder's `metrics.jsonl`: `--metric`, by default `rl/exact`, the share of exact answers among the step's
samples (drawn as the mean of the last ten steps), and what evaluation calls the same, such as
`eval/greedy_exact` (dots). The axis goes from 0 to 1, or as far as a panel's values do.
"""

import argparse
import glob
import json
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLORS = ["#0b6e99", "#c2571a", "#4c7a34", "#7a4c8f", "#8a6d00"]
WINDOW = 10  # steps that a point of a line is the mean of
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 420, 260, 48


@dataclass(frozen=True)
class Run:
    """What one folder logged. sampled, greedy: (step, the metric)."""

    name: str
    sampled: list[tuple[int, float]]
    greedy: list[tuple[int, float]]
    seconds: float

    def mean_sampled(self, points: slice) -> float:
        chosen = [value for _, value in self.sampled[points]]
        return sum(chosen) / len(chosen)


def read_run(folder: str, metric: str) -> Run:
    rows: dict[int, dict] = {}
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        for line in file:
            row = json.loads(line)
            # A resumed run repeats steps: the later line counts.
            rows[row["step"]] = rows.get(row["step"], {}) | row
    steps = sorted(rows)
    sampled, greedy = (
        [(step, rows[step][name]) for step in steps if name in rows[step]]
        for name in (metric, metric.replace("rl/", "eval/greedy_"))
    )
    return Run(
        os.path.basename(folder),
        sampled,
        greedy,
        sum(rows[step].get("time/step(s)", 0.0) for step in steps),
    )


def smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    smoothed = []
    for i, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, i + 1 - WINDOW) : i + 1]]
        smoothed.append((step, sum(window) / len(window)))
    return smoothed


def draw_panel(title: str, runs: list[Run], left: int, in_percent: bool) -> list[str]:
    points = [point for run in runs for point in smooth(run.sampled) + run.greedy]
    last_step, values = max(step for step, _ in points), [value for _, value in points]
    lowest, highest = min(0, *values), max(1, *values)
    right, top, bottom = left + PANEL_WIDTH, MARGIN, MARGIN + PANEL_HEIGHT

    def place(step: int, value: float) -> tuple[float, float]:
        x, share = left + PANEL_WIDTH * step / last_step, (value - lowest) / (highest - lowest)
        return round(x, 1), round(bottom - PANEL_HEIGHT * share, 1)

    marks = [f'<text x="{left}" y="{top - 16}" class="title">{escape(title)}</text>']
    for quarter in range(5):
        value = lowest + quarter * (highest - lowest) / 4
        _, y = place(0, value)
        label = f"{100 * value:.0f} %" if in_percent else f"{value:.2f}"
        marks.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" class="grid"/>')
        marks.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    for fifth in range(6):
        step = round(last_step * fifth / 5)
        x, _ = place(step, lowest)
        marks.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    middle = left + PANEL_WIDTH / 2
    marks.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">step</text>')
    for run, color in zip(runs, COLORS, strict=False):
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in smooth(run.sampled)))
        marks.append(f'<polyline points="{path}" stroke="{color}" class="line"/>')
        for x, y in (place(*point) for point in run.greedy):
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
    return marks


def draw(panels: dict[str, list[Run]], metric: str) -> str:
    step = PANEL_WIDTH + 2 * MARGIN
    width, height = step * len(panels), PANEL_HEIGHT + 3 * MARGIN
    marks: list[str] = []
    in_percent, name = metric == "rl/exact", "share of exact answers among samples"
    for number, (title, runs) in enumerate(panels.items()):
        marks += draw_panel(title, runs, number * step + MARGIN, in_percent)
    name = name if in_percent else escape(metric)
    legend = f"lines: {name} (mean of {WINDOW} steps), one per seed; dots: greedy"
    marks.append(f'<text x="{MARGIN}" y="{height - 8}">{legend}</text>')
    style = (
        "text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}"
        ".grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}"
    )
    body = "\n".join(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def print_table(panels: dict[str, list[Run]], metric: str) -> None:
    form = ".1%" if metric == "rl/exact" else ".3f"
    print(f"panel | run | {metric}, first 10 steps | last 10 | greedy, first | last | seconds")
    for title, runs in panels.items():
        for run in runs:
            greedy = [f"{value:{form}}" for _, value in run.greedy] or ["-"]
            print(
                f"{title} | {run.name} | {run.mean_sampled(slice(None, 10)):{form}} | "
                f"{run.mean_sampled(slice(-10, None)):{form}} | {greedy[0]} | {greedy[-1]} | "
                f"{run.seconds:.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("panels", nargs="+", metavar="TITLE=FOLDERS")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metric", default="rl/exact", help="such as rl/reward; default rl/exact")
    options = parser.parse_args()
    panels: dict[str, list[Run]] = {}
    for panel in options.panels:
        title, _, pattern = panel.partition("=")
        folders = sorted(glob.glob(pattern))
        if not folders:
            parser.error(f"no folder matches {pattern!r}")
        runs = [read_run(folder, options.metric) for folder in folders]
        # One that has only just begun has no curve yet.
        panels[title] = [run for run in runs if run.sampled]
        if not panels[title]:
            parser.error(f"no run of {pattern!r} has logged {options.metric!r}")
    print_table(panels, options.metric)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(panels, options.metric))


if __name__ == "__main__":
    main()
