"""The cost of imports, and their direction."""

import functools

import pytest

from scripts import architecture
from tests.torch_alone import run_with_torch_alone
from torchtitan.models import module_paths

pytestmark = pytest.mark.long

HEAVY = ["datasets", "transformers", "tokenizers", "tensorboard", "wandb", "torchao", "triton"]


STATEMENTS = [
    "import torchtitan",
    "import torchtitan.config",
    "from torchtitan.train import Trainer",
    "import torchtitan.rl.controller, torchtitan.integrations.tinker.server",
    "import torchtitan.integrations.openai, torchtitan.integrations.vllm",
]


@functools.cache
def loaded_modules(statement: str) -> set[str]:
    """Return the names of the modules that a statement loads after `import torch`."""
    code = f"import sys; before = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    return set(run_with_torch_alone(code).split())


def heavy_among(modules: set[str]) -> set[str]:
    """Return the modules of torch's compiler and of optional libraries."""
    compiler = ("torch._inductor", "torch._dynamo")
    return {m for m in modules if m.split(".")[0] in HEAVY or m.startswith(compiler)}


def test_import_torchtitan_loads_nothing_of_its_own():
    ours = {name for name in loaded_modules("import torchtitan") if name.startswith("torchtit")}
    assert ours == {"torchtitan"}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_import_leaves_inductor_and_optional_libraries_unloaded(statement):
    assert not heavy_among(loaded_modules(statement))


def test_import_of_trainer_is_no_command_line():
    code = (
        "import sys; sys.argv = ['x', '--not.a.flag']\n"
        "from torchtitan.train import Trainer\n"
        "assert sys.argv == ['x', '--not.a.flag']\n"
        "assert 'tyro' not in sys.modules"
    )
    assert run_with_torch_alone(code) == ""


def test_train_specs_of_families_load_neither_compiler_nor_dtensor():
    modules = loaded_modules(
        "import importlib\n"
        f"for path in {sorted(module_paths.values())}:\n"
        "    importlib.import_module(path).get_train_spec()"
    )
    assert "torchtitan.models.decoder" in modules
    assert "torch.distributed.tensor" not in modules
    assert not heavy_among(modules)


def test_config_errors_and_help_need_no_distributed_checkpointing():
    modules = loaded_modules("import torchtitan.train")
    assert "torch.distributed.checkpoint" not in modules and not heavy_among(modules)


def test_imports_point_down_the_layers():
    rank = {part: n for n, row in enumerate(architecture.LAYERS) for part in row}
    arrows = architecture.arrows()
    assert arrows.keys() == rank.keys()
    upwards = {
        f"{start} -> {end}": files
        for start, ends in arrows.items()
        for end, files in ends.items()
        if rank.get(end, len(rank)) >= rank[start]
    }
    assert upwards == {}


def test_picture_of_the_imports_is_the_code_s():
    assert architecture.PICTURE.read_text() == architecture.svg(), (
        "run: python -m scripts.architecture"
    )


# Files that a program may use without the rest of their part.
@pytest.mark.parametrize("file", ["rl/losses.py", "rl/batcher.py", "rl/tasks.py"])
def test_parts_of_rl_that_need_no_trainer(file):
    names = architecture.imported_modules(architecture.PACKAGE / file)
    light = {"tools", "config", "batch", "data", "loss", "rl"}
    assert {name.split(".")[1] for name in names} <= light
