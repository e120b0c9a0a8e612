"""Draw docs/architecture.svg, the imports between the parts of the package, from the code.

    python -m scripts.architecture [--check]

A part is a folder or a file directly under torchtitan/. Imports inside functions and for
annotations are included. Arrows that longer paths imply are left out of the picture.
tests/unit/test_imports.py fails if an import points up, or if the picture is out of date.
"""

import argparse
import ast
import itertools
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan"
PICTURE = ROOT / "docs/architecture.svg"

# From the bottom up. A part may import only parts of lower rows.
LAYERS = (
    ("tools",),
    ("numerics",),
    ("config",),
    ("distributed",),
    ("batch",),
    ("loss", "optim", "data"),
    ("protocols", "step"),
    ("compat",),
    ("callbacks",),
    ("models",),
    ("adapters",),
    ("generation", "checkpoint", "quantization"),
    ("job",),
    ("rank_layout",),
    ("build",),
    ("engine",),
    ("objective",),
    ("trainer",),
    ("train",),
    ("rl",),
    ("experiments", "testing"),
    ("integrations", "report", "cluster"),
    ("commands",),
    ("estimate",),
)
# Programs, and other paths of modules above, for other programs: nothing of the package imports them.
REFERENCE_PATHS = (
    "data/show.py",
    "components/",
    "hf_datasets/",
    "tools/profiling.py",
    "rl/client.py",
    "experiments/rl/",
)

_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _BEND_SPACE = 116, 30, 24, 34, 30


def imported_modules(path: Path) -> set[str]:
    """Return a file's imports from the package, including those in functions: "a.b", "a.b.name"."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("torchtitan.")}


def arrows() -> dict[str, dict[str, list[str]]]:
    """Return part -> imported part -> the files with such imports."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(REFERENCE_PATHS) or file in ("__init__.py", "__main__.py"):
            continue
        part = file.partition("/")[0].removesuffix(".py")
        ends = found.setdefault(part, {})
        for target in sorted({name.split(".")[1] for name in imported_modules(path)} - {part}):
            if target != "__version__":
                ends.setdefault(target, []).append(file)
    return found


def _without_implied(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without arrows that longer paths imply."""

    def reached_from(part: str) -> set[str]:
        return set().union(*({end} | reached_from(end) for end in graph[part]))

    below = {part: reached_from(part) for part in graph}
    return {
        part: {end for end in ends if not any(end in below[other] for other in ends)}
        for part, ends in graph.items()
    }


def _columns(rows: list[list[str]], lines: list[list[str]]) -> dict[str, float]:
    """Return the x of the middle of each box and bend: close to its neighbours, without overlaps."""
    neighbours: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for line in lines:
        for upper, lower in itertools.pairwise(line):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    space = {name: _BEND_SPACE if ">" in name else _BOX_WIDTH + _GAP_X for name in neighbours}
    x = {name: 100.0 * i - 50 * len(row) for row in rows for i, name in enumerate(row)}
    for _ in range(60):
        for row in rows:
            wanted = {
                name: statistics.fmean(x[other] for other in neighbours[name]) for name in row
            }
            row.sort(key=wanted.__getitem__)
            # Boxes that would overlap form a run, which is placed at their mean: (sum of the wanted
            # places less the boxes' offsets, number of boxes).
            offsets = list(
                itertools.accumulate(
                    ((space[a] + space[b]) / 2 for a, b in itertools.pairwise(row)), initial=0.0
                )
            )
            runs: list[tuple[float, int]] = []
            for name, offset in zip(row, offsets, strict=True):
                total, length = wanted[name] - offset, 1
                while runs and runs[-1][0] / runs[-1][1] > total / length:
                    before = runs.pop()
                    total, length = total + before[0], length + before[1]
                runs.append((total, length))
            left = [total / length for total, length in runs for _ in range(length)]
            x |= {n: at + offset for n, at, offset in zip(row, left, offsets, strict=True)}
    return x


def svg() -> str:
    """Return the picture. Imports point down; a long arrow has a bend in each row that it passes."""
    rank = {part: n for n, row in enumerate(LAYERS) for part in row}
    rows = [list(row) for row in LAYERS]
    lines = []
    for start, ends in sorted(_without_implied({k: set(v) for k, v in arrows().items()}).items()):
        for end in sorted(ends):
            bends = [(n, f"{start}>{end}:{n}") for n in range(rank[start] - 1, rank[end], -1)]
            for n, bend in bends:
                rows[n].append(bend)
                rank[bend] = n
            lines.append([start, *(bend for _, bend in bends), end])
    x = _columns(rows, lines)
    left, right = min(x.values()) - _BOX_WIDTH, max(x.values()) + _BOX_WIDTH
    height = len(rows) * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y
    top = {name: height - (n + 1) * (_BOX_HEIGHT + _GAP_Y) for name, n in rank.items()}
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left:.0f} 0 {right - left:.0f} {height}" '
        f'width="{right - left:.0f}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#567"/></marker></defs>',
        f'<rect x="{left:.0f}" width="{right - left:.0f}" height="{height}" fill="#fff"/>',
    ]
    for line in lines:
        path = f"M{x[line[0]]:.0f} {top[line[0]] + _BOX_HEIGHT}"
        for upper, lower in itertools.pairwise(line):
            # A straight line past the boxes of a row, then a curve between two rows.
            y1, y2 = top[upper] + _BOX_HEIGHT, top[lower]
            middle = (y1 + y2) // 2
            path += f" V{y1} C{x[upper]:.0f} {middle} {x[lower]:.0f} {middle} {x[lower]:.0f} {y2}"
        drawn.append(f'<path d="{path}" stroke="#567" fill="none" marker-end="url(#tip)"/>')
    for part in sorted(arrows()):
        drawn += [
            f'<rect x="{x[part] - _BOX_WIDTH / 2:.0f}" y="{top[part]}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="5" fill="#eef3f8" stroke="#567"/>',
            f'<text x="{x[part]:.0f}" y="{top[part] + 20}" text-anchor="middle">{part}</text>',
        ]
    return "\n".join([*drawn, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the picture is out of date")
    if parser.parse_args().check:
        raise SystemExit(PICTURE.read_text() != svg())
    PICTURE.write_text(svg())


if __name__ == "__main__":
    main()
