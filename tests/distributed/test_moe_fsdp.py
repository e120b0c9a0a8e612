"""A mixture of experts under FSDP, HSDP and DDP against one process, with checkpointing."""

import pytest
import torch

from tests.distributed.moe_runs import Layout, check_same, train, train_layouts
from torchtitan.testing.gloo import run_ranks

TWO_RANKS = [
    Layout(dp_replicate=2, num_microbatches=2, ac_mode="full"),
    Layout(dp_shard=2, num_microbatches=2, ac_mode="selective"),
]
FOUR_RANKS = [
    Layout(dp_shard=4, ac_mode="full"),  # 6 experts: two ranks hold none of the last two
    Layout(dp_replicate=2, dp_shard=2, ac_mode="selective", ac_option="2"),
]


def bf16_run(layout):
    record = train(layout)
    return record["losses"], record["biases"]


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(train, 1, Layout())[0]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(TWO_RANKS, id="2 ranks"),
        pytest.param(FOUR_RANKS, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_every_layout_learns_and_balances_as_one_process_does(layouts, one_process):
    assert one_process["losses"][-1] < one_process["losses"][0] - 0.3
    assert one_process["biases"].abs().amax() > 0.005 and not one_process["counts"].any()
    for records in run_ranks(train_layouts, layouts[0].world_size, layouts):
        for layout, record in zip(layouts, records, strict=True):
            check_same(record, one_process, layout)


def test_bf16_parameters_train_on_two_ranks(one_process):
    layout = Layout(dp_shard=2, param_dtype="bfloat16")
    (losses, biases), (_, biases_of_other) = run_ranks(bf16_run, 2, layout)
    assert losses == pytest.approx(one_process["losses"], abs=0.03)  # bf16 keeps three digits
    assert torch.equal(biases, biases_of_other) and biases.dtype == torch.float32
