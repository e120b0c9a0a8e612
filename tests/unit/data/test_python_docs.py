import os
import subprocess
import sys
from collections import Counter

import pytest

from torchtitan.data import python_docs
from torchtitan.data.python_docs import PythonDocs, module_text

SOURCE = b'''"""What the module is for."""
import os

class Box:
    """Holds one thing."""

    def open(self):
        """Give the thing.

            Indented remark.
        The end.
        """
        def helper():
            """Not reachable by name."""

    def close(self):
        return "no docstring"

async def fetch():
    """Wait for it."""
'''


def test_module_text_is_its_docstrings_in_source_order():
    assert module_text(SOURCE, "boxes") == (
        "The boxes module\n\n"
        "What the module is for.\n\n"
        "boxes.Box\n\nHolds one thing.\n\n"
        "boxes.Box.open\n\nGive the thing.\n\n    Indented remark.\nThe end.\n\n"
        "boxes.Box.open.helper\n\nNot reachable by name.\n\n"
        "boxes.fetch\n\nWait for it.\n"
    )


def test_splits_are_disjoint_and_hold_every_document_once():
    train, validation = PythonDocs("train"), PythonDocs("validation")
    total = len(train) + len(validation)
    assert total > 300
    assert len(validation) == total // python_docs.HELD_OUT_EVERY
    headings = Counter(docs[i]["text"] for docs in (train, validation) for i in range(0, 20))
    assert max(headings.values()) == 1
    with pytest.raises(ValueError, match="'train' or 'validation', got 'val'"):
        PythonDocs("val")


def test_order_is_the_same_in_every_process_and_no_module_is_run():
    script = (
        "import sys; from torchtitan.data.python_docs import PythonDocs; d = PythonDocs();"
        "before = set(sys.modules); print(len(d), [len(d[i]['text']) for i in range(30)]);"
        "loaded = {m for m in set(sys.modules) - before if m.split('.')[0] != 'encodings'};"
        "assert not loaded, loaded; assert 'datasets' not in sys.modules"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_either_source_alone_is_enough_and_none_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    without_topics = len(PythonDocs())
    assert without_topics > 200
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="training.dataset = 'local'"):
        PythonDocs()
    monkeypatch.undo()
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": "/nowhere"})
    assert 0 < len(PythonDocs()) < without_topics
