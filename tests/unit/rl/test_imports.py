"""The RL trainer needs no actor library, no inference engine and no GPU to be imported."""

import pytest

from tests.unit.test_imports import heavy_among, loaded_modules

pytestmark = pytest.mark.long

IMPORT_ALL = """
import importlib, pkgutil
sys.modules.update(dict.fromkeys(["ray", "monarch", "torchstore", "vllm"]))  # cannot be imported
import torchtitan.rl
names = [m.name for m in pkgutil.walk_packages(torchtitan.rl.__path__, "torchtitan.rl.")]
names += [f"torchtitan.integrations.{name}" for name in ("openai", "vllm", "tinker.server")]
for name in names:
    importlib.import_module(name)
"""


def test_every_module_imports_without_ray_monarch_vllm_and_loads_nothing_heavy():
    modules = loaded_modules(IMPORT_ALL)
    assert "torchtitan.rl.losses" in modules and not heavy_among(modules)
