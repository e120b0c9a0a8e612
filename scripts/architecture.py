"""Draw which part of the package imports which, from the code: docs/architecture.svg.

    python -m scripts.architecture [--check]

A part is a folder or a file directly under torchtitan/. Imports inside functions and for
annotations count. Arrows that longer paths imply are left out of the picture.
tests/unit/test_imports.py fails for an import that points up, and for a picture out of date.
"""

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan"
PICTURE = ROOT / "docs/architecture.svg"

# From the bottom up. A part imports only parts of the rows under its own.
LAYERS = (
    ("tools",),
    ("config",),
    ("distributed",),
    ("batch",),
    ("loss", "optim", "data"),
    ("protocols", "step"),
    ("listeners",),
    ("models",),
    ("generation", "checkpoint", "quantization"),
    ("build", "job"),
    ("engine",),
    ("trainer",),
    ("train",),
    ("rl",),
    ("experiments", "testing"),
)
# Old names of modules above, for other programs: nothing of the package imports them.
REFERENCE_PATHS = ("components/", "hf_datasets/", "tools/profiling.py", "experiments/rl/")

_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 116, 30, 40, 30


def imported_modules(path: Path) -> set[str]:
    """What a file imports of the package, at its top or inside functions: "a.b" and "a.b.name"."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("torchtitan.")}


def arrows() -> dict[str, dict[str, list[str]]]:
    """part -> part that it imports -> the files that do."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(REFERENCE_PATHS) or file == "__init__.py":
            continue
        part = file.partition("/")[0].removesuffix(".py")
        ends = found.setdefault(part, {})
        for target in sorted({name.split(".")[1] for name in imported_modules(path)} - {part}):
            if target != "__version__":
                ends.setdefault(target, []).append(file)
    return found


def _without_implied(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows that longer paths imply."""

    def reached_from(part: str) -> set[str]:
        return set().union(*({end} | reached_from(end) for end in graph[part]))

    below = {part: reached_from(part) for part in graph}
    return {
        part: {end for end in ends if not any(end in below[other] for other in ends)}
        for part, ends in graph.items()
    }


def svg() -> str:
    """The picture, with imports pointing down."""
    graph = _without_implied({part: set(ends) for part, ends in arrows().items()})
    width = max(map(len, LAYERS)) * (_BOX_WIDTH + _GAP_X) + _GAP_X
    height = len(LAYERS) * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y
    place: dict[str, tuple[float, float]] = {}
    for n, row in enumerate(LAYERS, start=1):
        left = (width - len(row) * (_BOX_WIDTH + _GAP_X) + _GAP_X) / 2
        for i, part in enumerate(row):
            place[part] = left + i * (_BOX_WIDTH + _GAP_X), height - n * (_BOX_HEIGHT + _GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#567"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for start, ends in sorted(graph.items()):
        for end in sorted(ends):
            x1, y1 = place[start][0] + _BOX_WIDTH / 2, place[start][1] + _BOX_HEIGHT
            x2, y2 = place[end][0] + _BOX_WIDTH / 2, place[end][1]
            rows_between = round((y2 - y1 - _GAP_Y) / (_BOX_HEIGHT + _GAP_Y))
            # Past the boxes of the rows between, on the side to which the arrow leans anyway.
            side = 1 if x1 + x2 >= width else -1
            bend = side * (_BOX_WIDTH * 0.75 + 12 * rows_between) if rows_between else 0
            middle = (x1 + x2) / 2 + 2 * bend
            lines.append(
                f'<path d="M{x1:g} {y1:g} Q{middle:g} {(y1 + y2) / 2:g} {x2:g} {y2:g}" '
                'stroke="#567" fill="none" marker-end="url(#tip)"/>'
            )
    for part, (x, y) in sorted(place.items()):
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5" '
            'fill="#eef3f8" stroke="#567"/>',
            f'<text x="{x + _BOX_WIDTH / 2:g}" y="{y + 20:g}" text-anchor="middle">{part}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the picture is out of date")
    if parser.parse_args().check:
        raise SystemExit(PICTURE.read_text() != svg())
    PICTURE.write_text(svg())


if __name__ == "__main__":
    main()
