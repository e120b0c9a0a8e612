"""Tests of this folder need CUDA and are skipped without it; they may run in any order."""

import gc

import pytest
import torch

from torchtitan.tools import host


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def nothing_is_left_for_the_next_test():
    """Engines that a test did not close keep deterministic kernels on, and the GPU's memory."""
    yield
    for engine in host.engines():
        engine.close()
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
