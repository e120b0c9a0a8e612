"""A text dataset that every Python installation ships: Python's documentation in English.

The documents are the topics of `help()` (`pydoc_data.topics`) and, for each module of the standard
library, the docstrings in its source, which is parsed when the document is read, and never run.
CPython 3.11 has 529 documents with 2.3 million characters in total.
"""

import ast
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Every 20th document is kept out of training, for validation.
HELD_OUT_EVERY = 20

# Folders of the standard library that hold tests, applications, data tables or other projects.
SKIPPED_FOLDERS = frozenset(
    "__pycache__ __phello__ dist-packages encodings ensurepip idlelib lib-dynload lib2to3 "
    "pydoc_data site-packages test tests turtledemo".split()
)


class PythonDocs:
    """The documentation of this Python interpreter, one document per index. split: "train" or "validation"."""

    def __init__(self, split: str = "train") -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
        by_name: dict[str, str | Path] = _modules()
        with suppress(ImportError):  # some distributions ship `pydoc_data` separately
            from pydoc_data.topics import topics  # loads 0.7 MB of text

            by_name |= {f"topic {name}": text for name, text in topics.items()}
        if not by_name:
            raise ValueError(
                "this Python ships neither pydoc_data nor the sources of its standard library; train on "
                "your own file instead: training.dataset = 'local' with training.dataset_path"
            )
        # Sorting by a hash mixes topics and modules in the same order on every machine.
        names = sorted(by_name, key=lambda name: (zlib.crc32(name.encode()), name))
        self._documents = [
            (name, by_name[name])
            for number, name in enumerate(names, start=1)
            if (number % HELD_OUT_EVERY == 0) == (split == "validation")
        ]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, str]:
        name, text = self._documents[index]
        if isinstance(text, Path):
            text = module_text(text.read_bytes(), name.removeprefix("module "))
        return {"text": text}


def module_text(source: bytes, module_name: str) -> str:
    """Return a heading and the docstrings in a module's source, each below the name it documents."""
    parts = [f"The {module_name} module"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source may have invalid escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return parts[0] + "\n"
    for name, docstring in _docstrings(tree, module_name):
        parts.append(docstring if name == module_name else f"{name}\n\n{docstring}")
    return "\n\n".join(parts) + "\n"


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if docstring := ast.get_docstring(node):
        yield name, docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")


def _modules() -> dict[str, str | Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = {}
    # Finds nothing if the standard library is a zip file.
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and name[:7] != "config-"
        ]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__" and len(parts) > 1
            name = ".".join(parts[:-1] if is_package else parts)
            modules[f"module {name}"] = path
    return modules
