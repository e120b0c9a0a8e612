"""Whole training runs under pipeline parallelism against one process."""

import pytest
import torch

from tests.distributed.training_runs import (
    FOUR_LAYERS,
    make_trainer,
    max_relative_difference,
)
from torchtitan.testing.gloo import run_ranks

# fp32: the order of summation differs between layouts.
TOLERANCE = 1e-5
PACKED = ["--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]
PACKED += [FOUR_LAYERS]  # one for each of four stages


def pipeline(schedule, dp_shard=1, dp_replicate=1, local_batch_size=8, pp=2):
    return [
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        f"--parallelism.data_parallel_shard_degree={dp_shard}",
        f"--parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"--training.local_batch_size={local_batch_size}",
    ]


# ---- the engine, fed by its owner ----


def feed(dump_folder, overrides):
    """Return (losses, gradient norms) for lists of unlike microbatches and a custom loss."""
    engine = make_trainer(dump_folder, [*PACKED, *overrides, "--training.local_batch_size=4"])
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []

    def weighted(logits, labels, batch):
        logprobs = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return -(logprobs * batch["weights"]).sum()

    for lengths in ((5, 32, 16), (9,), (8, 8, 30, 3, 17)):
        batches, labels = [], []
        for length in lengths:
            tokens = torch.randint(0, 2048, (1, length + 1), generator=generator)
            batches.append({"input": tokens[:, :-1], "positions": torch.arange(length)[None]})
            labels.append(tokens[:, 1:])
        total = sum(lengths)
        loss = engine.forward_backward_step(
            input_dict=batches, labels=labels, global_valid_tokens=total
        )
        losses.append(loss.item())
        norms.append(engine.optim_step().grad_norm.item())
    # `weights` are for the loss alone: not for the model.
    engine.post_dataloading_process = drop_weights(engine.post_dataloading_process)
    batch = {**batches[2], "weights": torch.linspace(0, 1, 30)[None]}
    loss = engine.forward_backward_step(
        input_dict=[batch], labels=labels[2:3], global_valid_tokens=30, loss_fn=weighted
    )
    losses.append(loss.item())
    norms.append(engine.optim_step().grad_norm.item())
    engine.close()
    return losses, norms


def drop_weights(process):
    def without(batch, labels):
        return process({key: batch[key] for key in batch if key != "weights"}, labels)

    return without


def leak(dump_folder, overrides):
    """Return the isolation probe's verdict on a model whose layer 3 lets tokens see the whole row."""
    trainer = make_trainer(
        dump_folder, [*PACKED, *overrides, "--debug.check_document_isolation_freq=1"]
    )
    for part in trainer.model_parts:
        if "3" in part.layers:
            part.layers["3"].register_forward_hook(lambda m, args, x: x + x.mean(1, keepdim=True))
    with pytest.raises(RuntimeError, match="documents are not isolated at step 1") as error:
        trainer.train()
    trainer.close()
    return str(error.value)


def feed_and_leak(dump_folder, overrides):
    return feed(dump_folder, overrides), leak(dump_folder, overrides)


def test_lists_of_any_lengths_and_own_losses_and_the_layer_that_leaks(tmp_path):
    ((expected, _),) = run_ranks(
        feed_and_leak, 1, str(tmp_path / "one"), [], init_process_group=False
    )
    results = run_ranks(
        feed_and_leak, 2, str(tmp_path / "two"), pipeline("1F1B"), init_process_group=False
    )
    for fed, _ in results:
        for ours, theirs in zip(fed, expected, strict=True):
            assert max_relative_difference(ours, theirs) < TOLERANCE
    # The rank with the logits finds the leak, and names a layer of whichever rank has it.
    assert "layers.3 is the first layer" in results[1][1]
    assert "another rank found a leak" in results[0][1]
