"""Applies units to a copy of torchtitan 0.2.2, shows their diffs, and takes them back.

A unit is a folder `NN_name` with

- `unit.toml`: its title and its edits, in order;
- `new/`: files to add, under the paths that they get;
- `replacements.py`: functions that take the place of functions of the reference, or stand before them.

An edit is "of" a function, class or field, and has the SHA-256 (16 digits) of that node's source in 0.2.2.
Places are found through `ast`, so no text of the reference is stored.
"""

import ast
import difflib
import hashlib
import json
import shutil
import textwrap
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "0.2.2"
STATE = "torchtitan/.patches"  # in the target: the applied units, and the files as they were
Edit = dict[str, Any]


class Refusal(Exception):
    """Why nothing was changed, in one sentence."""


class Unit(NamedTuple):
    number: int
    title: str
    edits: list[Edit]
    new: dict[str, str]  # path in the target -> text
    replacements: str


def load_units() -> dict[int, Unit]:
    units = {}
    for folder in sorted(Path(__file__).parent.glob("[0-9][0-9]_*")):
        table, number = tomllib.loads(_read(folder / "unit.toml")), int(folder.name[:2])
        root, functions = folder / "new", folder / "replacements.py"
        new = {p.relative_to(root).as_posix(): _read(p) for p in sorted(root.rglob("*.py"))}
        replacements = _read(functions) if functions.is_file() else ""
        units[number] = Unit(number, table["title"], table["edits"], new, replacements)
    return units


# ---- one module ----


class Source:
    """A module's text, and where its nodes are."""

    def __init__(self, text: str):
        self.text = text
        self.tree = ast.parse(text)
        self.lines = text.encode().splitlines(keepends=True)  # ast counts columns in bytes

    def find(self, name: str) -> Any:
        """Return the function, class or field with a qualified name, such as `Trainer.train`."""
        node: Any = self.tree
        for part in name.split("."):
            node = _only([child for child in node.body if _name_of(child) == part], name)
        return node

    def _offset(self, line: int) -> int:
        return sum(map(len, self.lines[: line - 1]))

    def span(self, first: Any, last: Any = None) -> tuple[int, int]:
        """Return the first and the last byte of one node, or of several; decorators left out."""
        start, last = self._offset(first.lineno) + first.col_offset, last or first
        return start, self._offset(last.end_lineno) + last.end_col_offset

    def of(self, start: int, end: int) -> str:
        return self.text.encode()[start:end].decode()

    def replace(self, span: tuple[int, int], new: str) -> "Source":
        old = self.text.encode()
        return Source((old[: span[0]] + new.encode() + old[span[1] :]).decode())

    def insert(self, line: int, code: str, column: int = 0) -> "Source":
        """Insert code before a line, which is counted from 1, with `column` spaces before it."""
        return self.replace((self._offset(line),) * 2, textwrap.indent(code, " " * column))

    def delete_lines(self, first: int, last: int) -> "Source":
        return self.replace((self._offset(first), self._offset(last + 1)), "")


def _name_of(node: Any) -> str | None:
    """Return the name of a function, class, variable, or field."""
    return getattr(getattr(node, "target", node), "id", getattr(node, "name", None))


def _only(nodes: list[Any], what: str) -> Any:
    if len(nodes) != 1:
        raise Refusal(f"{what} occurs {len(nodes)} times, not once")
    return nodes[0]


def _all(node: ast.AST, kind: Any) -> list[Any]:
    return [child for child in ast.walk(node) if isinstance(child, kind)]


def _calls(node: ast.AST, function: str) -> list[ast.Call]:
    names = (
        (getattr(c.func, "id", getattr(c.func, "attr", None)), c) for c in _all(node, ast.Call)
    )
    return [call for name, call in names if name == function]


# ---- one edit ----


def apply_edit(source: Source, edit: Edit, replacements: str) -> Source:
    """Return the module after an edit, of one of the kinds below."""
    kind, name = edit["kind"], edit["of"].partition(":")[2]
    code = textwrap.dedent(edit.get("code", "")).strip("\n") + "\n"
    if kind == "import":  # after the last import at the top
        last = [n for n in source.tree.body if isinstance(n, ast.Import | ast.ImportFrom)][-1]
        return source.insert(last.end_lineno + 1, code)
    node = source.find(name)
    column = node.col_offset
    if kind == "optional":  # a field's type, or None
        return source.replace((source.span(node.annotation)[1],) * 2, " | None")
    if kind == "field":  # fields after a field and its description
        body = source.find(name.rpartition(".")[0]).body
        description = body[body.index(node) + 1]
        return source.insert(description.end_lineno + 1, "\n" + code, column)
    if kind == "function":  # a function of replacements.py before another
        return source.insert(node.lineno, _own(replacements, edit["name"], column) + "\n\n")
    if kind == "replace":  # a function by its namesake in replacements.py
        return source.replace(source.span(node), _own(replacements, node.name, column).strip())
    if kind == "delete":  # a function, and the blank line before it
        return source.delete_lines(node.lineno - 1, node.end_lineno)
    if kind == "start":  # statements after a function's docstring
        first = node.body[1 if ast.get_docstring(node) is not None else 0]
        return source.insert(first.lineno, code, first.col_offset)
    call = edit.get("call", "")
    if kind == "before":  # statements before the one of a function's body that calls another
        statement = _only([n for n in node.body if _calls(n, call)], f"{name}: a call of {call}")
        return source.insert(statement.lineno, code, statement.col_offset)
    if kind == "branch":  # the body of an `if` whose test calls a function
        branches = [branch for branch in _all(node, ast.If) if _calls(branch.test, call)]
        body = _only(branches, f"{name}: an if that calls {call}").body
        indented = textwrap.indent(code, " " * body[0].col_offset).strip()
        return source.replace(source.span(body[0], body[-1]), indented)
    assert kind == "wrap", kind  # an expression; {} stands for it
    if "argument" in edit:
        old = _only(_calls(node, call), f"{name}: a call of {call}").args[edit["argument"]]
    elif "added_to" in edit:
        sums = [n for n in _all(node, ast.AugAssign) if _name_of(n) == edit["added_to"]]
        old = _only(sums, f"{name}: {edit['added_to']} +=").value
    else:
        old = _only(_all(node, ast.Return), f"{name}: return").value
    span = source.span(old)
    return source.replace(span, code.strip().replace("{}", source.of(*span)))


def _own(replacements: str, name: str, column: int) -> str:
    """Return a function of replacements.py, indented."""
    source = Source(replacements)
    return textwrap.indent(source.of(*source.span(source.find(name))), " " * column)


def drop_unused_imports(source: Source, original: Source) -> Source:
    """Return the module without the imports that only 0.2.2's code needed."""
    before, after = ({n.id for n in _all(s.tree, ast.Name)} for s in (original, source))
    for node in [n for n in source.tree.body if isinstance(n, ast.ImportFrom)][::-1]:
        kept = [alias.name for alias in node.names if alias.name not in before - after]
        if not kept:
            source = source.delete_lines(node.lineno, node.end_lineno or node.lineno)
        elif len(kept) < len(node.names):
            names = ", ".join(kept)
            if len(node.module or "") + len(names) > 73:  # of the 88 columns of 0.2.2's formatter
                names = "(\n    " + ",\n    ".join(kept) + ",\n)"
            source = source.replace(source.span(node), f"from {node.module} import {names}")
    return source


# ---- a copy of 0.2.2 ----


def _path(edit: Edit) -> str:
    return edit["of"].partition(":")[0].replace(".", "/") + ".py"


def _read(path: Path) -> str:
    return path.read_text("utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Target:
    """A folder with the package `torchtitan` of 0.2.2, to which units may have been applied.

    Raises Refusal for another version, and if a patched file was changed since.
    """

    def __init__(self, root: Path):
        self.root, self.state = root, root / STATE
        self.applied: list[int] = []
        self.digests: dict[str, str] = {}  # path -> of its patched text
        versions = [p.stem.removeprefix("torchtitan-") for p in root.glob("torchtitan-*.dist-info")]
        if (root / "assets/version.txt").is_file():  # a checkout
            versions = [_read(root / "assets/version.txt").strip()]
        if versions != [VERSION] or not (root / "torchtitan/train.py").is_file():
            found = f"torchtitan {' and '.join(versions)}" if versions else "no torchtitan"
            raise Refusal(f"{root} has {found}, and these units are for {VERSION}")
        if (self.state / "state.json").is_file():
            self.applied, self.digests = json.loads(_read(self.state / "state.json"))
        for path, digest in self.digests.items():
            if not (root / path).is_file() or _digest(_read(root / path)) != digest:
                raise Refusal(
                    f"{path} was changed after units were applied; undo that change first"
                )

    def _kept(self, path: str) -> Path:
        return self.state / "original" / path

    def original(self, path: str) -> str:
        """Return a file's text in 0.2.2."""
        kept = self._kept(path)
        return _read(kept if kept.is_file() else self.root / path)

    def render(self, units: list[Unit]) -> dict[str, str]:
        """Return path -> text for every file that the units change or add.

        Raises Refusal if the source that an edit is of is not that of 0.2.2.
        """
        originals = {
            path: Source(self.original(path)) for u in units for path in map(_path, u.edits)
        }
        sources = dict(originals)
        for unit in units:
            for edit in unit.edits:
                path = _path(edit)
                if edit["kind"] != "import":
                    node = originals[path].find(edit["of"].partition(":")[2])
                    digest = _digest(originals[path].of(*originals[path].span(node)))[:16]
                    if digest != edit["sha256"]:
                        raise Refusal(
                            f"{edit['of']} is not that of {VERSION}, so unit {unit.number} cannot edit it "
                            f"(SHA-256 {digest} here, {edit['sha256']} there)"
                        )
                sources[path] = apply_edit(sources[path], edit, unit.replacements)
        texts = {path: drop_unused_imports(s, originals[path]).text for path, s in sources.items()}
        return texts | {path: text for unit in units for path, text in unit.new.items()}

    def apply(self, numbers: list[int]) -> None:
        """Apply units besides those that are applied already."""
        numbers, units = sorted({*numbers, *self.applied}), load_units()
        files = self.render([units[number] for number in numbers])
        added = {path for number in numbers for path in units[number].new}
        for path in sorted(added - self.digests.keys()):
            if (self.root / path).exists():
                raise Refusal(f"{path} is there, and a unit adds a file of that name; rename yours")
        for path in files.keys() - added - self.digests.keys():
            self._kept(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / path, self._kept(path))
        self.applied = numbers
        self.digests = {path: _digest(text) for path, text in files.items()}
        self.state.mkdir(exist_ok=True)
        (self.state / "state.json").write_text(json.dumps([self.applied, self.digests]), "utf-8")
        for path, text in files.items():
            (self.root / path).write_text(text, "utf-8")

    def undo(self) -> None:
        """Restore 0.2.2."""
        for path in self.digests:
            if self._kept(path).is_file():
                shutil.copyfile(self._kept(path), self.root / path)
            else:
                (self.root / path).unlink()
        shutil.rmtree(self.state, ignore_errors=True)
        self.applied, self.digests = [], {}


def unified_diff(target: Target, unit: Unit) -> str:
    """Return a unit's diff against 0.2.2, under a line with its number and title."""
    parts = [f"# Unit {unit.number}: {unit.title}\n"]
    for path, text in target.render([unit]).items():
        old = "" if path in unit.new else target.original(path)
        before = "/dev/null" if path in unit.new else f"a/{path}"
        parts += difflib.unified_diff(
            old.splitlines(True), text.splitlines(True), before, f"b/{path}"
        )
    return "".join(parts)
