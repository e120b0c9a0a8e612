#!/usr/bin/env python
"""The shape of Python packages as a table: size, functions, helpers, imports, errors, words.

    scripts/code_shape.py                           torchtitan as it stands
    scripts/code_shape.py main~5:torchtitan torchtitan
    scripts/code_shape.py --json benchmarks tests

Each argument is a folder, or REVISION:FOLDER of this repository.
"""

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

Sources = dict[str, str]
"""Path below the package's parent folder -> text."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Folders of the package that are not its core.
EDGES = ("rl/", "integrations/", "report/", "tools/report/", "testing/")


def read_sources(where: str) -> Sources:
    """The Python files of a folder, or of REVISION:FOLDER. Raises ValueError if there are none."""
    revision, _, folder = where.rpartition(":")
    if revision:
        command = ["git", "archive", "--format=tar", revision, folder]
        archived = subprocess.run(command, capture_output=True)
        if archived.returncode:
            raise ValueError(f"git archive {revision} {folder}: {archived.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            files = {m.name: archive.extractfile(m).read().decode() for m in archive if m.isfile()}
    else:
        files = {path.as_posix(): path.read_text() for path in Path(folder).rglob("*.py")}
    parent = PurePosixPath(folder).parent
    sources = {
        PurePosixPath(path).relative_to(parent).as_posix(): text
        for path, text in sorted(files.items())
        if path.endswith(".py")
    }
    if not sources:
        raise ValueError(f"{where} has no Python files")
    return sources


def shape_of(sources: Sources) -> dict[str, Any]:
    """Name of each figure -> its value; see the table's rows for what they are."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lines = {path: len(text.splitlines()) for path, text in sources.items()}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    everything = [node for path in trees for node in nodes[path]]
    functions = [(length(n), p, n) for p in trees for n in nodes[p] if isinstance(n, FUNCTIONS)]
    classes = [(length(n), p, n) for p in trees for n in nodes[p] if isinstance(n, ast.ClassDef)]
    lengths = sorted(size for size, _, _ in functions) or [0]
    longest_class = max(classes, key=lambda one: one[0], default=None)
    longest_function = max(functions, key=lambda one: one[0], default=None)
    helpers, used_once = helpers_used_once(trees)
    chain, cycles = import_chain(trees)
    comments = sum(count_comments(text) for text in sources.values())
    kinds = Counter(type(node) for node in everything)
    in_core = {path: not path.partition("/")[2].startswith(EDGES) for path in sources}
    docstrings = [ast.get_docstring(n) or "" for n in everything if isinstance(n, DOCUMENTED)]
    return {
        "files": len(sources),
        "lines": sum(lines.values()),
        "core lines": sum(n for path, n in lines.items() if in_core[path]),
        "longest file": "{1} {0}".format(*max(lines.items(), key=lambda one: one[1])),
        "longest class": longest_class
        and "{} lines, {} methods, {}".format(
            longest_class[0],
            sum(isinstance(node, FUNCTIONS) for node in longest_class[2].body),
            f"{longest_class[1]} {longest_class[2].name}",
        ),
        "functions": len(functions),
        "function lines, median": statistics.median_low(lengths),
        "function lines, p90": lengths[int(0.9 * (len(lengths) - 1))],
        "longest function": longest_function
        and f"{longest_function[0]} {longest_function[1]} {longest_function[2].name}",
        "underscored functions": helpers,
        "underscored functions used once": used_once,
        "imports inside functions": sum(
            isinstance(inner, (ast.Import, ast.ImportFrom))
            for _, _, function in functions
            for inner in own_nodes(function)
        ),
        "longest import chain": len(chain),
        "import chain": " -> ".join(chain),
        "import cycles": len(cycles),
        "modules in cycles": [" ".join(cycle) for cycle in cycles],
        "raise : assert": f"{kinds[ast.Raise]} : {kinds[ast.Assert]}",
        "comment lines, %": round(100 * comments / max(1, sum(lines.values())), 1),
        "docstrings": sum(map(bool, docstrings)),
        "docstrings that begin with What, Whether, How": sum(
            text.startswith(("What", "Whether", "How")) for text in docstrings
        ),
    }


def length(node: ast.AST) -> int:
    """Lines from the first decorator to the end."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return node.end_lineno - first + 1


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes inside a function, without those of functions inside it."""
    found, left = [], list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, FUNCTIONS):
            left += ast.iter_child_nodes(node)
    return found


DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def helpers_used_once(trees: dict[str, ast.Module]) -> tuple[int, int]:
    """(underscored functions of modules and classes, how many have one mention besides their own)."""
    helpers: list[str] = []
    mentions: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                names = [one.name for one in node.body if isinstance(one, FUNCTIONS)]
                helpers += [n for n in names if n.startswith("_") and not n.endswith("__")]
            elif isinstance(node, ast.Name):
                mentions[node.id] += 1
            elif isinstance(node, ast.Attribute):
                mentions[node.attr] += 1
    return len(helpers), sum(mentions[name] == 1 for name in helpers)


def import_chain(trees: dict[str, ast.Module]) -> tuple[list[str], list[list[str]]]:
    """(the longest chain of modules that import each other when loaded, the cycles among them)."""
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in trees
    }
    imports: dict[str, list[str]] = {}
    for module, path in modules.items():
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        targets: set[str] = set()
        left: list[ast.AST] = list(trees[path].body)
        while left:
            node = left.pop()
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = (
                    ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
                )
                names = {f"{base}.{alias.name}" for alias in node.names}
                targets |= {name if name in modules else base for name in names}
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                left += node.orelse
            elif not isinstance(node, FUNCTIONS):
                left += ast.iter_child_nodes(node)
        imports[module] = sorted((targets & modules.keys()) - {module})

    groups = strongly_connected(imports)
    group_of = {module: i for i, group in enumerate(groups) for module in group}
    best: list[list[str]] = []  # groups come after those they import
    for i, group in enumerate(groups):
        below = [
            best[group_of[target]]
            for module in group
            for target in imports[module]
            if group_of[target] != i
        ]
        best.append([min(group), *max(below, key=len, default=[])])
    return max(best, key=len, default=[]), [sorted(group) for group in groups if len(group) > 1]


def strongly_connected(edges: dict[str, list[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, each after the groups it points to (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in edges[node]:
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            start = stack.index(node)
            groups.append(stack[start:])
            del stack[start:]

    for node in edges:
        if node not in number:
            visit(node)
    return groups


def count_comments(text: str) -> int:
    """Comments, on lines of their own or behind code; docstrings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def table(shapes: dict[str, dict[str, Any]]) -> str:
    """One row per figure, one column per package; lists as long as they are stay in the JSON."""
    rows = [["", *shapes]]
    for name, value in next(iter(shapes.values())).items():
        if name != "import chain" and not isinstance(value, list):
            rows.append([name, *(str(shape[name]) for shape in shapes.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", default=["torchtitan"], help="[REVISION:]FOLDER")
    parser.add_argument("--json", action="store_true", help="print JSON, with chain and cycles")
    args = parser.parse_args(arguments)
    try:
        shapes = {where: shape_of(read_sources(where)) for where in args.packages}
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(shapes, indent=2) if args.json else table(shapes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
