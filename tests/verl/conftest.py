"""Lets verl load the CPU platform and the rollout of examples/verl, also in processes that tests start.

Without verl only the sampler is tested; scripts/run_verl_tests.sh installs verl.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[2] / "examples/verl")
sys.path.insert(0, FOLDER)
if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["test_[!s]*.py", "test_se*.py", "test_sf*.py"]
else:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_on_cpu.register"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny qwen3."""
    from tests.verl import cases

    return cases.save_model(str(tmp_path_factory.mktemp("models")), "qwen3")


@pytest.fixture
def alone(monkeypatch):
    """The environment of a single process for verl's worker."""
    from tests.verl import cases

    cases.pretend_torchrun(monkeypatch)
