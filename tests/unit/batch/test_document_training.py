"""Training on packed documents, from the text dataset to the loss, on one process in fp32."""

import pytest
import torch

from tests.unit.batch.document_runs import (
    KERNELS,
    dtype_of,
    largest_difference,
    make_trainer,
    short_documents,
    train,
)
from torchtitan.batch.documents import IGNORE_INDEX

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]
# Of logits of size 1.
ROUNDING = {"float32": dict(rtol=1e-4, atol=1e-5), "bfloat16": dict(rtol=3e-2, atol=6e-2)}


def test_flex_varlen_and_a_dense_mask_have_equal_losses(tmp_path):
    data = short_documents(tmp_path)
    runs = {kernel: train(tmp_path / kernel, kernel, 4, *data) for kernel in KERNELS}
    assert all(n_ends >= 12 for _, n_ends in runs.values())
    losses = {kernel: run[0] for kernel, run in runs.items()}
    if dtype_of("varlen") == "float32":
        assert losses["flex"] == losses["varlen"]  # one kernel on the CPU
    assert largest_difference(losses["flex"], losses["varlen"]) <= 2e-2  # bf16
    assert largest_difference(losses["flex"], losses["dense"]) <= ROUNDING["float32"]["atol"]


def one_step(trainer):
    """Microbatches of the first step, as the loss gets them, with their counts."""
    step = trainer.next_step(trainer.batch_generator(trainer.dataloader))
    return step.batches, step.num_valid_on_this_rank, step.counts.num_valid_tokens


def test_labels_after_end_of_text_count_neither_in_loss_nor_denominator(tmp_path):
    trainer = make_trainer(tmp_path, "flex", *short_documents(tmp_path))
    (batch,), valid, global_valid = one_step(trainer)
    labels, is_eos = batch.labels, batch.tokens == trainer.tokenizer.eos_id
    assert is_eos.any()
    assert torch.equal(labels == IGNORE_INDEX, is_eos)
    assert valid == global_valid == labels.numel() - int(is_eos.sum())


def test_throughput_counts_the_squares_of_real_document_lengths(tmp_path):
    trainer = make_trainer(tmp_path, "flex", *short_documents(tmp_path))
    (batch,), _, _ = one_step(trainer)
    squares = 0
    for row in batch.tokens.tolist():
        length = 0
        for token in row:
            length += 1
            if token == trainer.tokenizer.eos_id:
                squares, length = squares + length**2, 0
        squares += length**2
    trainer._count_flops()
    args = trainer.model_args
    per_length = 6 * args.n_layers * args.n_heads * 2 * args.attention_head_dim
    whole_row = trainer.num_flops_per_token
    expected = whole_row - per_length * (128 - squares / batch.tokens.numel())
    assert trainer.metrics_processor.num_flops_per_token == pytest.approx(expected, rel=1e-12)
    assert expected < whole_row


@pytest.mark.parametrize("attn_type", [pytest.param("flex", marks=pytest.mark.slow), "varlen"])
def test_changing_layouts_do_not_recompile_a_compiled_model(attn_type, tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    options = ["--compile.enable", "--compile.backend=aot_eager", "--compile.components", "model"]
    trainer = make_trainer(tmp_path, attn_type, *options)
    generator = torch.Generator().manual_seed(0)
    n_graphs = []
    for lengths in ([60, 68], [1] * 128, [128], [5, 5, 118], [100, 28], [3] * 42 + [2]):
        tokens = torch.randint(3, 2048, (2, 128), generator=generator)
        batch = {"input": tokens, "seq_lens": torch.tensor([lengths, lengths[::-1]])}
        trainer.forward_backward_step(input_dict=batch, labels=tokens, global_valid_tokens=1.0)
        n_graphs.append(counters["stats"]["unique_graphs"])
    assert n_graphs[1:] == [n_graphs[1]] * 5
