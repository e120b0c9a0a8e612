"""The probe for leaks between documents under layouts that split rows or layers."""

import pytest

from tests.distributed.training_runs import (
    FOUR_LAYERS,
    ONE_PROCESS,
    TENSOR_PARALLEL,
    make_trainer,
    max_relative_difference,
    run_layout,
)
from torchtitan.testing.gloo import run_ranks

PROBED = [
    "--model.attn_type=varlen",
    "--model.attn_mask_type=position_block_causal",
    "--debug.check_document_isolation_freq=1",
]
FIRST, OTHER = "layers.3 is the first layer", "another rank found a leak"


def leak(dump_folder, overrides):
    """Return the probe's verdict on a model whose layer 3 lets tokens see the whole row."""
    trainer = make_trainer(dump_folder, [*PROBED, FOUR_LAYERS, *overrides])
    for part in trainer.model_parts:
        if "3" in part.layers:
            part.layers["3"].register_forward_hook(lambda m, args, x: x + x.mean(1, keepdim=True))
    with pytest.raises(RuntimeError, match="documents are not isolated at step 1") as error:
        trainer.train()
    trainer.close()
    return str(error.value)


@pytest.mark.parametrize(
    "axis, verdicts", [("context", [FIRST, FIRST]), ("pipeline", [OTHER, FIRST])]
)
def test_layer_that_leaks_is_named_on_the_ranks_that_see_logits(axis, verdicts, tmp_path):
    overrides = [f"--parallelism.{axis}_parallel_degree=2", "--training.local_batch_size=4"]
    messages = run_ranks(leak, 2, str(tmp_path), overrides, init_process_group=False)
    for message, verdict in zip(messages, verdicts, strict=True):
        assert verdict in message


def test_packed_documents_of_odd_length_pass_under_tensor_parallelism(tmp_path):
    alone, split = (
        run_layout(layout, str(tmp_path / layout.name), 3, [*PROBED, "--training.seq_len=33"])
        for layout in (ONE_PROCESS, TENSOR_PARALLEL)
    )
    for key in ("loss", "grad_norm"):  # fp32: the order of summation differs between layouts
        assert max_relative_difference(split[key], alone[key]) < 1e-5, key
