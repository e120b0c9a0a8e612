"""Fixtures and settings of every test file."""

import dataclasses
import gc
import os
import sys

import hypothesis
import pytest
import torch

from torchtitan.models.llama3 import llama3_args
from torchtitan.testing import gloo
from torchtitan.tools import host, utils
from torchtitan.tools.logging import logger, saying_once_per

gc.disable()  # until all tests are collected: nearly all that imports make stays

# Examples that take long on a busy machine are no failure.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

gloo.PRELOADED_MODULES.append("tests.preloaded")

if torch.cuda.is_available():
    # Deterministic kernels need it; cuBLAS reads it once, at the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# On a machine with an accelerator these tests run on it. All other tests run on the CPU there too:
# they contain numbers of our CPU kernels, or pass host tensors and models to components.
ON_THE_DEVICE = (
    "tests/gpu/",
    "tests/compat/",
    "tests/unit/rl/test_controller.py",
    "tests/unit/rl/test_rescore.py",
    "tests/unit/rl/test_trainer.py",
    "tests/unit/config/test_bad_input.py",
    "tests/unit/batch/test_document_training.py",
    "tests/unit/step/test_update.py",
    "tests/unit/test_engine.py",
    "tests/unit/test_guest.py",
    "tests/unit/callbacks/test_isolation_probe.py",
    "tests/unit/optim/test_offload.py",
    "tests/unit/tools/test_tools.py",
)
BEYOND_THE_KERNELS = "needs 16-bit numbers on an accelerator"


def pytest_collection_modifyitems(config, items):
    unit = config.rootpath / "tests/unit"
    for item in items:
        if item.path.is_relative_to(unit):
            if not any(item.iter_markers("long")) and not any(item.iter_markers("slow")):
                item.add_marker("quick")


def pytest_collection_finish():
    """Exclude the objects that exist before the first test from every later garbage collection."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # for tests that make millions of objects it saves a tenth of the time


@pytest.fixture(autouse=True)
def nothing_was_said():
    """What is said once per process is said once per test."""
    with saying_once_per(set()):
        yield


@pytest.fixture
def own_flavors(monkeypatch):
    """Undo what `tests.reliability.tiny_flavor` changes in this process."""
    monkeypatch.setitem(llama3_args, "debugmodel", llama3_args["debugmodel"])
    monkeypatch.delitem(sys.modules, "tests.reliability.tiny_flavor", raising=False)
    yield
    sys.modules.pop("tests.reliability.tiny_flavor", None)


@pytest.fixture(autouse=True, scope="module")
def device_of_module(request):
    """Set the device of this file's tests, and of processes that they start."""
    root = request.config.rootpath
    path = request.path.relative_to(root).as_posix()
    if path.startswith(ON_THE_DEVICE) or utils.get_device_type() == "cpu":
        yield
        return
    if torch.cuda.is_available():  # the driver, and torch, read the variables below only once
        torch.cuda.init()
        torch.cuda.device_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "device_type", "cpu")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("HIP_VISIBLE_DEVICES", "")
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test whose job an accelerator's kernels cannot run ("varlen" in fp32)."""
    try:
        return (yield)
    except ValueError as error:
        if utils.get_device_type() != "cpu" and BEYOND_THE_KERNELS in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def logger_as_it_was():
    """Undo `main()`, which adds a handler and stops propagation, because later tests read caplog."""
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="module")
def narrow_debugmodel():
    """`llama3`'s debug model has a quarter of its width in this process: files use it to be quicker."""
    narrow = dataclasses.replace(llama3_args["debugmodel"], dim=64, n_heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(llama3_args, "debugmodel", narrow)
        yield


@pytest.fixture(autouse=True, scope="module")
def engines_left_open_end_with_their_file():
    """Otherwise their changes to the process would affect later files."""
    yield
    for engine in host.engines():
        host.move_out(engine)


def destroy_what_begins_here():
    was_initialized = torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized() and not was_initialized:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def process_group_of_module_as_it_was():
    """Do the same as below for engines that a file's fixtures build before its first test."""
    yield from destroy_what_begins_here()


@pytest.fixture(autouse=True)
def process_group_as_it_was():
    """Destroy the process group that an engine makes if there is none, and that it leaves."""
    yield from destroy_what_begins_here()
