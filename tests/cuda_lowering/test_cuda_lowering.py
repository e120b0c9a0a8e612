"""Steps of training, lowered to binaries of an H100, and a block's kernels run on numbers.

In processes of their own, as the device has to be there before torch is imported.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda_lowering.cases import CASES, EXPECTED, QUICK
from tests.cuda_lowering.target import SHARED_MEMORY, why_not

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ["llama3", "qwen3", "gpt_oss", "deepseek_v3", "llama4"]
reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"cannot lower for CUDA: {reason}")


def records(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cuda_lowering.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
             "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert lines, done.stderr[-4000:]
    return [json.loads(line) for line in lines]


def slow(names, quick=()):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow(CASES, QUICK))
def test_step_launches_what_the_table_says_and_every_kernel_fits_the_card(name):
    (record,) = records("run", name)
    assert record["error"] is None, record["error"]
    expected = vars(EXPECTED[name]) if name in EXPECTED else {"breaks": 0, "problems": []}
    assert {key: record[key] for key in expected} == expected
    assert record["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("name", slow(BLOCKS))
def test_kernels_of_a_block_compute_what_the_eager_block_does(name):
    (record,) = records("interpret", name)
    largest = max(record["differences"].values())
    # fp32 with other orders of sums, of some hundred terms; those of sinks cancel. An error in a mask
    # or factor is 1e-2.
    assert largest < 1e-5, record["differences"]
    assert len(record["differences"]) >= 10


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_kernels_of_the_delta_rule_fit_the_card():
    kernels = records("fla_kernels")
    assert len(kernels) >= 10
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in kernels)
