"""The RL trainer needs no actor library, no inference engine and no GPU to be imported."""

import pytest

from tests.torch_alone import run_with_torch_alone

pytestmark = pytest.mark.long

# Runs in a process of its own, where only torch is loaded.
IMPORT_ALL = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "monarch", "torchstore", "vllm"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocker())
import torch
before = set(sys.modules)
import torchtitan.rl
names = [m.name for m in pkgutil.walk_packages(torchtitan.rl.__path__, "torchtitan.rl.")]
assert "torchtitan.rl.losses" in names, names
names += [f"torchtitan.integrations.{name}" for name in ("openai", "vllm", "tinker.server")]
for name in names:
    importlib.import_module(name)
heavy = {"datasets", "transformers", "tokenizers", "tensorboard", "wandb", "torchao", "triton"}
loaded = {m for m in set(sys.modules) - before if m.split(".")[0] in heavy}
loaded |= {m for m in set(sys.modules) - before if m.startswith(("torch._inductor", "torch._dynamo"))}
assert not loaded, sorted(loaded)[:10]
"""


def test_every_module_imports_without_ray_monarch_vllm_and_loads_nothing_heavy():
    run_with_torch_alone(IMPORT_ALL)
