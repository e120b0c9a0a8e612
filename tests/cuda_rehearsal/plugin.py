"""Runs tests of tests/unit as they would run on a CUDA machine, up to the numbers.

    python -m pytest -p tests.cuda_rehearsal.plugin tests/unit/test_engine.py

A test that asks for a number that only a device could tell is skipped there: at the read itself,
or, where the project read it and went on with a made-up one, at the assertion that then fails.
Anything else that fails is a fault of the CUDA path, or of the test's idea of it.
"""

# ruff: noqa: E402 (the device has to be there before torch)

import traceback
from typing import Any

import pytest

from tests.cuda_rehearsal.device import load_device, patch_cuda

load_device()

import torch

from tests.cuda_rehearsal.rehearsal import Rehearsal, patch_kernels

patch_cuda()
patch_kernels()


def _skip_if_of_test(what: str, frame: Any) -> None:
    if frame is not None and "/torchtitan/" not in frame.f_code.co_filename:
        pytest.skip(f"{what} in line {frame.f_lineno}: this number only a device knows")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Around fixtures, too: those of a file build engines."""
    item.stash["rehearsal"] = rehearsal = Rehearsal(on_read=_skip_if_of_test)
    with rehearsal:
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    made_up = item.stash["rehearsal"].made_up
    if not made_up or not isinstance(error, AssertionError | pytest.fail.Exception):
        return
    where = traceback.extract_tb(error.__traceback__)
    if any("/tests/" in frame.filename for frame in where[-2:]):
        outcome.force_exception(pytest.skip.Exception(f"compares {made_up} made-up number(s)"))


def pytest_report_header():
    return f"rehearsing CUDA on torch {torch.__version__}"
