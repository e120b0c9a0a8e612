"""Steps of training, lowered to binaries of an H100, and a block's kernels run on numbers."""

from importlib.util import find_spec

import pytest

from tests.cuda_lowering.cases import CASES, EXPECTED, QUICK
from tests.cuda_lowering.target import SHARED_MEMORY, why_not
from tests.cuda_rehearsal.records import records

BLOCKS = ["llama3", "qwen3", "gpt_oss", "deepseek_v3", "llama4"]
reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"cannot lower for CUDA: {reason}")


def slow(names, quick=()):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow(CASES, QUICK))
def test_step_launches_what_the_table_says_and_every_kernel_fits_the_card(name):
    record = records("tests.cuda_lowering.run", name)[name]
    assert record["error"] is None, record["error"]
    expected = vars(EXPECTED[name]) if name in EXPECTED else {"breaks": 0, "problems": []}
    assert {key: record[key] for key in expected} == expected
    assert record["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("name", slow(BLOCKS))
def test_kernels_of_a_block_compute_what_the_eager_block_does(name):
    record = records("tests.cuda_lowering.interpret", name)[name]
    assert record["error"] is None, record["error"]
    largest = max(record["differences"].values())
    # fp32 with other orders of sums, of some hundred terms; those of sinks cancel. An error in a mask
    # or factor is 1e-2.
    assert largest < 1e-5, record["differences"]
    assert len(record["differences"]) >= 10


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_kernels_of_the_delta_rule_fit_the_card():
    kernels = records("tests.cuda_lowering.fla_kernels")
    assert len(kernels) >= 10
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in kernels.values())
