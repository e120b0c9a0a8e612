"""The probe for leaks between documents under layouts that split rows or layers."""

import pytest

from tests.distributed.training_runs import FOUR_LAYERS, make_trainer
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


def leaks(dump_folder, axes):
    flags = "--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=1"
    return [leak(dump_folder, [*flags, f"--parallelism.{axis}_parallel_degree=2"]) for axis in axes]


def test_layer_that_leaks_is_named_on_the_ranks_that_see_logits(tmp_path):
    axes = ["context", "pipeline"]
    first, second = run_ranks(leaks, 2, str(tmp_path), axes, init_process_group=False)
    for message, verdict in zip([*first, *second], [FIRST, OTHER, FIRST, FIRST], strict=True):
        assert verdict in message


def losses_and_norms(dump_folder, degree):
    flags = ["--training.seq_len=33", "--training.steps=3", "--training.local_batch_size=8"]
    flags.append(f"--parallelism.tensor_parallel_degree={degree}")
    trainer, found = make_trainer(dump_folder, [*PROBED, *flags]), []
    trainer.metrics_processor.log = lambda step, *numbers, **_: found.append(numbers)
    trainer.train()
    trainer.close()
    return found


def test_packed_documents_of_odd_length_pass_under_tensor_parallelism(tmp_path):
    alone, split = (
        run_ranks(losses_and_norms, n, str(tmp_path), n, init_process_group=False)[0]
        for n in (1, 2)
    )
    # fp32: the order of summation differs between layouts
    assert split == [pytest.approx(numbers, rel=1e-5) for numbers in alone] and len(alone) == 3
