"""scripts/code_shape.py counts what a reader would count."""

import importlib.util
import json
import subprocess
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


CORRIDOR = {
    "trainer.py": """class Trainer:
    def train_step(self, data):
        self.part.accumulate(next(data))
        self.isolation_probe.check(data)
""",
    "step.py": """from batch import TokenBatch

def accumulate(batches: list[TokenBatch], engine: Any):
    "What is done."
    return batches[0].moved(prepare(batches[0]), Runner().run(batches[0]))

def prepare(batch: "X | TokenBatch"): ...

class Runner:
    def run(self, batch: TokenBatch): return self.encode(batch)
    def encode(self, batch: TokenBatch): ...
""",
    "elsewhere.py": "def encode(batch: TokenBatch): ...  # not what Runner.run calls",
    "step2.py": "def prepare(batch: TokenBatch): ...\ndef unrelated(batch: TokenBatch): ...\n",
    "batch.py": "class TokenBatch:\n    def moved(self, other: 'X', its: TokenBatch): ...\n",
    "probe.py": "def check(batch: TokenBatch, trainer: Any | None = None): ...\n",
    "rl/step.py": "def accumulate(batch: TokenBatch): ...\n",
    "names.py": """def choose(f, g):
    if f.__module__ == "a" or __name__ == "b":
        return getattr(f, "__name__", "")
    return hasattr(f, "__wrapped__"), getattr(f, "__func__", f), f"{g.__name__}"
""",
}


def test_rooms_of_a_batch_untyped_engines_and_decisions_by_name_are_counted():
    sources = {f"package/{name}": text for name, text in CORRIDOR.items()}
    shape = code_shape.shape_of(sources)
    assert shape["names of the rooms"] == [
        "package/step.py",
        "package/step2.py",
        "package/trainer.py",
    ]
    assert shape["rooms of a batch"] == 3
    assert shape["engines typed Any"] == 2
    assert shape["decisions by name"] == 3  # not the fallback to a function, nor a message
    assert (shape["docstrings"], shape["docstrings that begin with What, Whether, How"]) == (1, 1)
    assert shape["lines"] - shape["core lines"] == 1


def test_packages_and_revisions_stand_side_by_side(package, capsys, monkeypatch):
    monkeypatch.chdir(package.parent)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    (package / "third.py").unlink()

    assert code_shape.main(["HEAD:package", "package"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["HEAD:package", "package"],
        ["files", "4", "3"],
    ]
    code_shape.main(["--json", "HEAD:package"])
    assert json.loads(capsys.readouterr().out)["HEAD:package"]["import cycles"] == 1
    with pytest.raises(SystemExit):
        code_shape.main(["no such folder"])
    assert "has no Python files" in capsys.readouterr().err
