"""scripts/code_shape.py counts what a reader would count."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "code_shape.py"
spec = importlib.util.spec_from_file_location("code_shape", SCRIPT)
code_shape = importlib.util.module_from_spec(spec)
spec.loader.exec_module(code_shape)

FILES = {
    "__init__.py": "",
    "first.py": '''"""Says what it is for."""
from package.second import Thing  # a comment behind code


def public(x):
    import json

    def inside():
        import os
        return os

    # A comment of its own.
    return _once(x) + _twice(x) + _twice(x), json, inside


def _once(x):
    assert x
    return Thing()


def _twice(x):
    raise ValueError(x)
''',
    "second.py": "from . import third\n\n\nclass Thing:\n    def _unused(self):\n        return third\n",
    "third.py": "from . import second\n",
}


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_figures_of_a_small_package(package):
    shape = code_shape.shape_of(code_shape.read_sources(str(package)))
    assert shape["files"] == 4
    assert shape["lines"] == sum(len(text.splitlines()) for text in FILES.values())
    assert shape["longest file"] == "22 package/first.py"
    assert shape["longest class"] == "3 lines, 1 methods, package/second.py Thing"
    assert shape["longest function"] == "9 package/first.py public"
    assert (shape["functions"], shape["function lines, median"]) == (5, 3)
    assert (shape["underscored functions"], shape["underscored functions used once"]) == (3, 1)
    assert shape["imports inside functions"] == 2
    assert shape["modules in cycles"] == ["package.second package.third"]
    assert shape["import chain"] == "package.first -> package.second"
    assert shape["raise : assert"] == "1 : 1"
    assert shape["comment lines, %"] == round(100 * 2 / shape["lines"], 1)
