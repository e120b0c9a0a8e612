"""English text that every Python brings along: its own documentation.

The documents are the chapters behind `help()` (`pydoc_data.topics`) and, per module of the
standard library, the docstrings in its source. Nothing is downloaded and no module is run:
sources are parsed, one file at a time, when their document is asked for. With CPython 3.11 there
are 529 documents of 2.3 million characters together, 0.76 million tokens of the tokenizer in
tests/assets/tokenizer.
"""

import ast
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# Every 20th document is kept out of training, for validation.
HELD_OUT_EVERY = 20

# Folders of the standard library that hold tests, applications, data tables or other projects.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "__phello__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class PythonDocs:
    """Documents of the running Python by number: `docs[i]` is `{"text": ...}`.

    split: "train", or "validation" for the documents held out of it.
    Raises ValueError on a Python that ships neither topics nor library sources.
    """

    def __init__(self, split: str = "train") -> None:
        documents = _in_fixed_random_order({**_topics(), **_modules()})
        if not documents:
            raise ValueError(
                "this Python ships neither pydoc_data nor the sources of its standard library, so "
                "the dataset python_docs is empty; train on a file of yours instead: "
                "training.dataset = 'local' with training.dataset_path"
            )
        held_out = slice(HELD_OUT_EVERY - 1, None, HELD_OUT_EVERY)
        if split == "train":
            del documents[held_out]
        elif split == "validation":
            documents = documents[held_out]
        else:
            raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": self._documents[index]()}


def module_text(source: bytes, module_name: str) -> str:
    """The docstrings in a module's source, each under the name of what it documents.

    The module's own comes first, then those of its classes and functions, in source order.
    A source that this Python cannot parse gives the heading alone.
    """
    parts = [f"The {module_name} module"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in strings are not ours to report
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return parts[0] + "\n"
    for name, docstring in _docstrings(tree, module_name):
        parts.append(docstring if name == module_name else f"{name}\n\n{docstring}")
    return "\n\n".join(parts) + "\n"


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a module or class and of what its body defines, at any depth."""
    docstring = ast.get_docstring(node)
    if docstring:
        yield name, docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")


def _in_fixed_random_order(documents: dict[str, Callable[[], str]]) -> list[Callable[[], str]]:
    """Topics and modules mixed, the same way on every machine and in every process."""
    names = sorted(documents, key=lambda name: (zlib.crc32(name.encode()), name))
    return [documents[name] for name in names]


def _topics() -> dict[str, Callable[[], str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return {}
    return {f"topic {name}": partial(str, text) for name, text in topics.items()}


def _modules() -> dict[str, Callable[[], str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return {
        f"module {_module_name(path, root)}": partial(_read_module, path, root)
        for path in _source_files(root)
    }


def _source_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():  # the library may be inside a zip file
        return
    for entry in sorted(folder.iterdir()):
        if entry.suffix == ".py":
            yield entry
        elif entry.is_dir() and not _is_skipped(entry.name):
            yield from _source_files(entry)


def _is_skipped(folder_name: str) -> bool:
    return folder_name in SKIPPED_FOLDERS or folder_name.startswith("config-")


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read_module(path: Path, root: Path) -> str:
    return module_text(path.read_bytes(), _module_name(path, root))
