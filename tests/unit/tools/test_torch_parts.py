"""Private names of torch are used in one module only, and a missing one is a sentence at start-up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan.config import ConfigManager
from torchtitan.job import resolve_job
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import RunError
from torchtitan.tools.torch_versions import TESTED

PACKAGE = Path(torch_parts.__file__).resolve().parents[1]
MISSING = "does_not_exist_in_this_torch"

# What may stay outside `torch_parts`: names of Python, and of other libraries.
OF_PYTHON = {"_exit", "_replace", "_fields", "_current_frames"}
OF_LIBRARIES = {
    "integrations/": {"_registry", "_WORLD", "_ROLLOUT_REGISTRY", "_finalizer"},
    "quantization/": {"_auto_filter_for_recipe", "_precomputed_scale", "_tensor", "_data"},
    "distributed/dtensor.py": {"_precomputed_scale"},
    "distributed/float8_tensor_parallel.py": {"_data", "_scale", "_orig_dtype"},
}


# Replaces parts of torch by those of a device that is not there, in a process of its own.
STANDS_FOR_A_DEVICE = "estimate/"
BY_NAME = re.compile(r"\b((get|has|set|del)attr|change_attribute)$")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names that the package itself defines."""
    names: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_names_of_torch(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield what a file uses of torch's private names, or probably does."""
    names_of_torch = set()  # what the file calls modules and classes of torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full = prefix + alias.name
                if full.split(".")[0] == "torch":
                    names_of_torch.add(alias.asname or alias.name.split(".")[0])
                    if any(map(is_private, full.split("."))):
                        yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            use = ast.unparse(node)
            if use.split(".")[0] in names_of_torch or node.attr not in own:
                yield use
        elif isinstance(node, ast.Call):
            texts = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
            if any(is_private(text) and text not in own for text in texts):
                if BY_NAME.search(ast.unparse(node.func)):
                    yield ast.unparse(node)


def private_names_outside_the_table(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    own, found = own_names(trees), {}
    for file, tree in trees.items():
        allowed = OF_PYTHON.union(*(v for k, v in OF_LIBRARIES.items() if file.startswith(k)))
        uses = set(private_names_of_torch(tree, own))
        uses = {use for use in uses if not allowed & set(re.findall(r"\w+", use))}
        if uses and file != "tools/torch_parts.py":
            found[file] = uses
    return found


def test_private_names_of_torch_are_reached_through_torch_parts():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    trees = {
        file: ast.parse(path.read_text())
        for file, path in files.items()
        if not file.startswith(STANDS_FOR_A_DEVICE)
    }
    assert private_names_outside_the_table(trees) == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "import torch\ntorch.ops.aten._scaled_mm",
        "from torch import distributed as dist\ndist.distributed_c10d._world",
        "def f(group): group._get_backend()",
        "def f(stager): getattr(stager, '_staging_stream', None)",
    ],
)
def test_a_private_name_elsewhere_is_found(code):
    assert private_names_outside_the_table({"engine.py": ast.parse(code)}).keys() == {"engine.py"}
    ours = ast.parse("class A:\n    def __init__(self): self._x = 1\n    def f(self, b): b._x")
    assert private_names_outside_the_table({"engine.py": ours}) == {}


def test_parts_that_the_package_names_are_those_of_the_table():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\btorch_parts\.(\w+)", text)}
    assert named - vars(torch_parts).keys() <= torch_parts.PARTS.keys()
    quoted = {name for text in sources for name in re.findall(r"\"(\w+)\"", text)}
    imported = " ".join(re.findall(r"torch_parts import (.*)", "\n".join(sources)))
    assert torch_parts.PARTS.keys() <= named | quoted | set(re.findall(r"\w+", imported))


@pytest.mark.skipif(torch.__version__.split("+")[0] not in TESTED, reason="not read yet")
@pytest.mark.parametrize("name", torch_parts.PARTS)
def test_tested_torch_has_the_part(name):
    spellings, members = torch_parts.PARTS[name].spellings, torch_parts.PARTS[name].members
    if torch.distributed.is_nccl_available() or "NCCL" not in spellings[0]:
        assert "" in [torch_parts._resolve(spelling, members)[-1] for spelling in spellings]


FOUR_RANKS = ["--comm.mode=fake_backend", "--parallelism.data_parallel_shard_degree=4"]
AC = "--activation_checkpoint"
LACKS = f"which torch {torch.__version__} does not have; install torch 2.11 to 2.15, or set"


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        (
            "copy_states",
            ["--checkpoint.enable", "--checkpoint.async_mode=async"],
            "checkpoint.async_mode = 'async' needs torch.distributed._state_dict_utils."
            f"_copy_state_dict, {LACKS} it to 'disabled'",
        ),
        (
            "RecomputeMode",
            [f"{AC}.mode=selective", f"{AC}.selective_ac_option=op"],
            "activation_checkpoint.mode = 'selective' with selective_ac_option = 'op' needs "
            f"torch.utils.checkpoint._CachedTorchDispatchMode, {LACKS} mode = 'full'",
        ),
    ],
)
def test_a_missing_part_is_one_sentence_at_start_up_of_jobs_that_use_it(
    name, flags, sentence, tmp_path, monkeypatch
):
    monkeypatch.setenv("NGPU", "4")
    common = [f"--job.dump_folder={tmp_path}", "--model.name=llama3", "--model.flavor=debugmodel"]
    job, other = (ConfigManager().parse_args(common + more) for more in (flags, FOUR_RANKS))
    other.activation_checkpoint.mode = "none"
    resolve_job(job, builds_data=False)
    owner, attribute = torch_parts.place(name)
    monkeypatch.delattr(owner, attribute)
    resolve_job(other, builds_data=False)
    with pytest.raises(RunError) as raised:
        resolve_job(job, builds_data=False)
    assert str(raised.value) == sentence


def test_a_part_with_a_replacement_may_be_missing(monkeypatch):
    name = "staging_stream"
    gone = torch_parts.PARTS[name]._replace(spellings=[f"torch:{MISSING}"])
    monkeypatch.setitem(torch_parts.PARTS, name, gone)
    monkeypatch.setattr(torch_parts, "place", torch_parts.place.__wrapped__)
    assert torch_parts.get(name) is None
    monkeypatch.setitem(torch_parts.PARTS, name, gone._replace(instead=""))
    with pytest.raises(RunError, match=f"needs torch.{MISSING}, which torch"):
        torch_parts.get(name)


def test_a_missing_member_is_named(monkeypatch):
    monkeypatch.delattr(torch.utils._pytree, "tree_map_only")
    with pytest.raises(
        RunError, match=r"^every job needs torch.utils._pytree.tree_map_only, which"
    ):
        torch_parts.check(ConfigManager().parse_args([]))
