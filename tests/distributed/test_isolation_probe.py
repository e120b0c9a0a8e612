"""The probe for leaks between documents under layouts that split rows or layers."""

import pytest

from tests.distributed.layout_matrix import BY_NAME, config_of
from tests.distributed.training_runs import FOUR_LAYERS, make_trainer
from torchtitan.testing.gloo import run_ranks

PROBED = [
    "--model.attn_type=varlen",
    "--model.attn_mask_type=position_block_causal",
    "--debug.check_document_isolation_freq=1",
]
FIRST, OTHER = "layers.3 is the first layer", "another rank found a leak"


def add_mean_of_row(block):
    block.register_forward_hook(lambda m, args, x: x + x.mean(1, keepdim=True))


def leak(dump_folder, overrides):
    """Return the probe's verdict on a model whose layer 3 lets tokens see the whole row."""
    trainer = make_trainer(dump_folder, [*PROBED, FOUR_LAYERS, *overrides])
    for part in trainer.model_parts:
        if "3" in part.layers:
            add_mean_of_row(part.layers["3"])
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


# ---- linear attention ----

LINEAR, EXPERTS = "qwen3_5", "qwen3_5 MoE"
TWO = ("TP 2", "PP 2, 1F1B", "CP 2", "CP 2, alltoall, full AC", "FSDP 2")
PRODUCTS = ("TP 2, CP 2", "FSDP 2, PP 2")
CASES = {
    1: [("1 process", LINEAR), ("1 process", EXPERTS)],
    2: [*((name, LINEAR) for name in TWO), ("FSDP 2, EP 2", EXPERTS)],
    4: [*((name, LINEAR) for name in PRODUCTS), ("FSDP 2, PP 2, EP 2", EXPERTS)],
}


def probe(dump_folder, cases):
    """Fail unless the probe reports each model with a leak, and only with one."""
    from torchtitan.train import Trainer

    for name, family in cases:
        flags = [*BY_NAME[name].overrides(), *PROBED, "--training.steps=3"]
        with Trainer(config_of(family, flags, dump_folder)) as trainer:
            trainer.train()
        with Trainer(config_of(family, flags, dump_folder)) as trainer:
            for part in trainer.model_parts:
                for block in part.layers.values():
                    add_mean_of_row(block)
            with pytest.raises(RuntimeError, match="documents are not isolated at step"):
                trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_linear_attention_passes_the_probe_in_every_layout_and_a_leak_does_not(n_ranks, tmp_path):
    how = dict(init_process_group=False, timeout_seconds=600)
    run_ranks(probe, n_ranks, str(tmp_path), CASES[n_ranks], **how)
