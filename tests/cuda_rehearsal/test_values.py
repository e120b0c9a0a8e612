"""Tests run on a device with values, and those that are wrong there fail."""

import os
import subprocess
import sys

import pytest

from tests.cuda_rehearsal.device import why_not

TESTS = """
import torch
from torch.nn import functional as F

from tests.unit.test_engine import make_engine, num_valid, random_batch


def test_engine_trains_on_the_device(tmp_path):
    engine = make_engine(tmp_path)
    batch, labels = random_batch(2, 32)
    losses = []
    for _ in range(2):
        loss = engine.forward_backward_step(
            input_dict=batch, labels=labels, global_valid_tokens=num_valid(labels)
        )
        losses.append(loss.item())
        engine.optim_step(lr=1e-3)
    assert loss.device == torch.device("cuda", 0) and 0 < losses[1] < losses[0] < 9


def test_numbers_are_those_of_the_host():
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    y = x.view(2, 3)
    (y[1] * torch.tensor(2.0)).sum().backward()
    assert x.grad.is_cuda and x.grad.cpu().tolist() == [0, 0, 0, 2, 2, 2]
    with torch.no_grad():
        y.mul_(2)
    assert x.tolist() == [0, 2, 4, 6, 8, 10]


def test_mask_of_the_host_meets_the_device():
    F.relu(torch.ones(3, device="cuda") * torch.ones(3))


def test_compiles():
    torch.compile(torch.sin)(torch.ones(3, device="cuda"))
"""


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_test_that_brings_host_and_device_together_fails_and_others_pass(tmp_path):
    path = tmp_path / "test_on_device.py"
    path.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.cuda_rehearsal.values", "-rfs", "-q"]
    environment = os.environ | {"COLUMNS": "300"}  # the summary's lines are not cut
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True)
    summary = done.stdout.partition("short test summary info")[2]
    assert "1 failed, 2 passed, 1 skipped" in summary, done.stdout
    assert "test_mask_of_the_host_meets_the_device - RuntimeError: Expected all tensors" in summary
    assert "needs a real device" in summary
