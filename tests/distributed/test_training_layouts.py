"""Layout changes the speed and nothing else: whole training runs on 1, 2 and 4 gloo ranks."""

import pytest

from tests.distributed.training_runs import (
    ACCUMULATION_LAYOUTS,
    DATA_PARALLEL_LAYOUTS,
    ONE_PROCESS,
    TENSOR_PARALLEL_LAYOUTS,
    max_relative_difference,
    run_layout,
)

STEPS = 5
# fp32: the order of summation differs between layouts, which AdamW carries over the steps.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def one_process_run(tmp_path_factory):
    return run_layout(ONE_PROCESS, str(tmp_path_factory.mktemp("one")), STEPS)


@pytest.mark.parametrize(
    "layout",
    DATA_PARALLEL_LAYOUTS + TENSOR_PARALLEL_LAYOUTS + ACCUMULATION_LAYOUTS,
    ids=lambda layout: layout.name,
)
def test_layout_gives_the_losses_and_gradient_norms_of_one_process(
    layout, one_process_run, tmp_path
):
    run = run_layout(layout, str(tmp_path), STEPS)
    assert run["step0_hash"] == one_process_run["step0_hash"]
    assert max_relative_difference(run["loss"], one_process_run["loss"]) < TOLERANCE
    assert max_relative_difference(run["grad_norm"], one_process_run["grad_norm"]) < TOLERANCE


def test_layout_changes_nothing_for_packed_documents(tmp_path):
    """Boundaries are left out of the loss, unequally many on each rank and in each microbatch."""
    packed = ["--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]
    layouts = ONE_PROCESS, ACCUMULATION_LAYOUTS[-1]
    one, many = (run_layout(layout, str(tmp_path / layout.name), 5, packed) for layout in layouts)
    assert max_relative_difference(many["loss"], one["loss"]) < TOLERANCE
    assert max_relative_difference(many["grad_norm"], one["grad_norm"]) < TOLERANCE


def test_same_run_twice_is_bitwise_equal(one_process_run, tmp_path):
    again = run_layout(ONE_PROCESS, str(tmp_path), STEPS)
    assert again["loss"] == one_process_run["loss"]
    assert again["grad_norm"] == one_process_run["grad_norm"]
