"""What importing costs, and which way the imports point."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.models import _supported_models

PACKAGE = Path(__file__).resolve().parents[2] / "torchtitan"
HEAVY = ["datasets", "transformers", "tokenizers", "tensorboard", "wandb", "torchao", "triton"]


def modules_loaded_by(statement: str) -> set[str]:
    """Names of the modules in memory after `statement` that `import torch` had not loaded."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        f"{statement}\n"
        "print('\\n'.join(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split("\n"))


def heavy_among(modules: set[str]) -> set[str]:
    """Those of torch's compiler and of optional libraries."""
    compiler = ("torch._inductor", "torch._dynamo")
    return {m for m in modules if m.split(".")[0] in HEAVY or m.startswith(compiler)}


def test_import_torchtitan_loads_nothing_of_its_own():
    ours = {name for name in modules_loaded_by("import torchtitan") if name.startswith("torchtit")}
    assert ours == {"torchtitan"}


@pytest.mark.parametrize(
    "statement",
    [
        "import torchtitan",
        "import torchtitan.config",
        "import torchtitan.train",
        "from torchtitan.train import Trainer",
    ],
)
def test_import_leaves_inductor_and_optional_libraries_unloaded(statement):
    assert not heavy_among(modules_loaded_by(statement))


def test_import_of_trainer_is_no_command_line():
    code = (
        "import sys; sys.argv = ['x', '--not.a.flag']\n"
        "from torchtitan.train import Trainer\n"
        "assert sys.argv == ['x', '--not.a.flag']\n"
        "assert 'tyro' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("family", sorted(_supported_models))
def test_flavors_of_a_family_are_light_and_its_train_spec_loads_no_compiler(family):
    modules = modules_loaded_by(
        f"import torchtitan.models.{family} as family\n"
        "light = set(sys.modules) - before\n"
        "assert not {'torch.distributed.tensor', 'torchtitan.models.decoder'} & light\n"
        "family.get_train_spec()"
    )
    assert "torchtitan.models.decoder" in modules
    assert not heavy_among(modules)


def test_config_errors_and_help_need_no_distributed_checkpointing():
    modules = modules_loaded_by("import torchtitan.train")
    assert "torch.distributed.checkpoint" not in modules


def package_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports at module level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("torchtitan.")}


# folder (or file) -> what it must not import
FORBIDDEN = {
    "tools": ["components", "distributed", "models", "engine", "trainer", "hf_datasets", "rl"],
    "config": ["components", "distributed", "models", "engine", "trainer", "hf_datasets", "rl"]
    + ["protocols", "job", "train"],
    "distributed": ["models", "components", "checkpoint", "engine", "trainer", "hf_datasets", "rl"],
    "components": ["engine", "trainer", "train", "rl"],
    "checkpoint": ["engine", "trainer", "train", "hf_datasets", "rl"],
    "models": ["engine", "trainer", "train", "config.manager", "rl"],
    "generation": ["components", "engine", "trainer", "train", "config.manager", "rl"],
    "hf_datasets": ["engine", "trainer", "train", "models", "distributed", "rl"],
    "step": ["build", "engine", "trainer", "train", "hf_datasets", "models", "rl"],
    "build.py": ["step", "engine", "trainer", "train", "hf_datasets", "models", "rl"],
    "engine.py": ["trainer", "train", "hf_datasets", "models", "rl"],
    "trainer.py": ["train", "models", "rl"],
    "rl/losses.py": ["engine", "trainer", "models", "distributed"],
    "rl/batcher.py": ["engine", "trainer", "models", "distributed"],
    "rl/tasks.py": ["engine", "trainer", "models", "distributed"],
}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_no_import_points_against_the_data_flow(part):
    root = PACKAGE / part
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    assert files
    banned = [f"torchtitan.{name}" for name in FORBIDDEN[part]]
    for path in files:
        for name in package_imports(path):
            for ban in banned:
                assert name != ban and not name.startswith(ban + "."), f"{path} imports {name}"
