"""Lets verl load the CPU platform and the rollout of examples/verl, also in processes that tests start."""

import importlib.util
import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[2] / "examples/verl")
sys.path.insert(0, FOLDER)
if importlib.util.find_spec("verl") is not None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_on_cpu.register"
