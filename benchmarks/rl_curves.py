"""Draws what RL runs logged, as one SVG, and prints a table of how they began and ended.

    python benchmarks/rl_curves.py --out docs/rl_curves.svg \\
        "copy 3 letters=outputs/rl/copy_cpu/seed_*" "sum of 2 digits=outputs/rl/sum_digits_cpu/seed_*"

Each argument is one panel: a title, and a pattern of dump folders, one line each. Read from a
folder's `metrics.jsonl`: `rl/exact`, the share of exact answers among the step's samples (drawn as
the mean of the last ten steps), and `eval/greedy_exact` (dots).
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
    """What one folder logged. sampled, greedy: (step, share of exact answers)."""

    name: str
    sampled: list[tuple[int, float]]
    greedy: list[tuple[int, float]]
    seconds: float

    def mean_sampled(self, points: slice) -> float:
        chosen = [share for _, share in self.sampled[points]]
        return sum(chosen) / len(chosen)


def read_run(folder: str) -> Run:
    rows: dict[int, dict] = {}
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        for line in file:
            row = json.loads(line)
            # A resumed run repeats steps: the later line counts.
            rows[row["step"]] = rows.get(row["step"], {}) | row
    steps = sorted(rows)
    return Run(
        os.path.basename(folder),
        [(step, rows[step]["rl/exact"]) for step in steps if "rl/exact" in rows[step]],
        [
            (step, rows[step]["eval/greedy_exact"])
            for step in steps
            if "eval/greedy_exact" in rows[step]
        ],
        sum(rows[step].get("time/step(s)", 0.0) for step in steps),
    )


def smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    smoothed = []
    for i, (step, _) in enumerate(points):
        window = [share for _, share in points[max(0, i + 1 - WINDOW) : i + 1]]
        smoothed.append((step, sum(window) / len(window)))
    return smoothed


def draw_panel(title: str, runs: list[Run], left: int) -> list[str]:
    last_step = max(step for run in runs for step, _ in run.sampled + run.greedy)
    right, top, bottom = left + PANEL_WIDTH, MARGIN, MARGIN + PANEL_HEIGHT

    def place(step: int, share: float) -> tuple[float, float]:
        x = left + PANEL_WIDTH * step / last_step
        return round(x, 1), round(bottom - PANEL_HEIGHT * share, 1)

    marks = [f'<text x="{left}" y="{top - 16}" class="title">{escape(title)}</text>']
    for percent in range(0, 101, 25):
        _, y = place(0, percent / 100)
        marks.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" class="grid"/>')
        marks.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for fifth in range(6):
        step = round(last_step * fifth / 5)
        x, _ = place(step, 0)
        marks.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    middle = left + PANEL_WIDTH / 2
    marks.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">step</text>')
    for run, color in zip(runs, COLORS, strict=False):
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in smooth(run.sampled)))
        marks.append(f'<polyline points="{path}" stroke="{color}" class="line"/>')
        for x, y in (place(*point) for point in run.greedy):
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
    return marks


def draw(panels: dict[str, list[Run]]) -> str:
    step = PANEL_WIDTH + 2 * MARGIN
    width, height = step * len(panels), PANEL_HEIGHT + 3 * MARGIN
    marks: list[str] = []
    for number, (title, runs) in enumerate(panels.items()):
        marks += draw_panel(title, runs, left=number * step + MARGIN)
    legend = f"lines: share of exact answers among samples (mean of {WINDOW} steps), one per seed; dots: greedy"
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


def print_table(panels: dict[str, list[Run]]) -> None:
    print("panel | run | exact, first 10 steps | last 10 | greedy, first | last | seconds")
    for title, runs in panels.items():
        for run in runs:
            greedy = [f"{share:.1%}" for _, share in run.greedy] or ["-"]
            print(
                f"{title} | {run.name} | {run.mean_sampled(slice(None, 10)):.1%} | "
                f"{run.mean_sampled(slice(-10, None)):.1%} | {greedy[0]} | {greedy[-1]} | "
                f"{run.seconds:.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("panels", nargs="+", metavar="TITLE=FOLDERS")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    panels: dict[str, list[Run]] = {}
    for panel in options.panels:
        title, _, pattern = panel.partition("=")
        folders = sorted(glob.glob(pattern))
        if not folders:
            parser.error(f"no folder matches {pattern!r}")
        runs = [read_run(folder) for folder in folders]
        # One that has only just begun has no curve yet.
        panels[title] = [run for run in runs if run.sampled]
    print_table(panels)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(panels))


if __name__ == "__main__":
    main()
