"""Training on packed documents, from the text dataset to the loss, on one process in fp32."""

from contextlib import nullcontext
from itertools import islice, pairwise

import pytest
import torch

from tests.unit.batch.document_runs import dtype_of, make_trainer, short_documents
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.batch.mask import DocumentMask
from torchtitan.step.objective import Tally

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]
# Of logits of size 1.
ROUNDING = {"float32": dict(rtol=1e-4, atol=1e-5), "bfloat16": dict(rtol=3e-2, atol=6e-2)}


def one_step(trainer):
    """Microbatches of the first step, as the loss gets them, with their counts."""
    step = trainer.next_step(trainer.batch_generator(trainer.dataloader))
    return step.batches, step.own_denominator, step.counts.denominator


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
    for row in batch.tokens:
        ends = ((row == trainer.tokenizer.eos_id).nonzero().flatten() + 1).tolist()
        squares += sum((end - first) ** 2 for first, end in pairwise([0, *ends, len(row)]))
    trainer._count_flops()
    args = trainer.model_args
    per_length = 6 * args.n_layers * args.n_heads * 2 * args.attention_head_dim
    whole_row = trainer.num_flops_per_token
    expected = whole_row - per_length * (128 - squares / batch.tokens.numel())
    assert trainer.metrics_processor.num_flops_per_token == pytest.approx(expected, rel=1e-12)
    assert expected < whole_row


def test_validation_leaves_out_the_same_labels(tmp_path):
    training_data = short_documents(tmp_path)
    data = [option.replace("training", "validation") for option in training_data]
    options = ["--validation.enable", "--validation.seq_len=128", "--validation.local_batch_size=2"]
    trainer = make_trainer(tmp_path, "flex", *training_data, *data, *options)
    input_dict, labels = next(iter(trainer.validator.validation_dataloader))
    trainer.validator.validation_context = nullcontext
    tally = Tally(trainer.validator.objective)
    loss, n_tokens = trainer.validator._forward(trainer.runner, input_dict, labels, tally)
    n_ends = int((input_dict["input"] == trainer.tokenizer.eos_id).sum())
    assert n_ends > 0 and n_tokens == labels.numel() - n_ends
    masked = trainer.packing.mask_labels(input_dict, labels)
    same = trainer.forward_backward_step(
        input_dict=input_dict, labels=masked, global_valid_tokens=1.0
    )
    assert loss.item() == pytest.approx(same.item(), rel=1e-6)


def test_restarted_positions_give_the_logits_of_positions_along_the_row(tmp_path):
    """RoPE turns by distance: within a document only rounding can differ."""
    outputs = []
    for setting in ("--training.restart_positions", "--training.no-restart_positions"):
        trainer = make_trainer(tmp_path, "varlen", *short_documents(tmp_path), setting)
        (batch,), _, _ = one_step(trainer)
        outputs += trainer.forward_step(batch)
    _, _, extra_inputs, _ = trainer.post_dataloading_process(batch, batch.labels)
    assert extra_inputs == {}
    torch.testing.assert_close(*outputs, **ROUNDING[dtype_of("varlen")])
    assert not torch.equal(*outputs)


def test_row_of_many_documents_may_be_longer_than_the_rope_table(tmp_path):
    trainer = make_trainer(tmp_path, "varlen", "--training.seq_len=16")
    tokens = torch.randint(3, 2048, (1, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input": tokens, "seq_lens": torch.tensor([[12, 16, 12]])}
    (packed,) = trainer.forward_step(batch)
    alone = [
        trainer.forward_step({"input": part, "seq_lens": torch.tensor([[part.shape[1]]])})[0]
        for part in tokens.split([12, 16, 12], dim=1)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **ROUNDING[dtype_of("varlen")])


@pytest.mark.parametrize("attn_type, builder", [("flex", "block_mask"), ("varlen", "with_lengths")])
def test_mask_is_built_once_per_batch_for_all_layers(attn_type, builder, tmp_path, monkeypatch):
    calls = []
    build = getattr(DocumentMask, builder)
    monkeypatch.setattr(
        DocumentMask, builder, lambda mask: calls.append(mask.starts.shape) or build(mask)
    )
    trainer = make_trainer(tmp_path, attn_type, *short_documents(tmp_path))
    (batch,), _, _ = one_step(trainer)
    assert trainer.model_args.n_layers > 1
    trainer.forward_backward_step(
        input_dict=[batch] * 2, labels=[batch.labels] * 2, global_valid_tokens=1.0
    )
    assert calls == [(2, 128)] * 2


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


def test_rows_of_text_have_positions_if_the_mask_reads_them(tmp_path):
    trainer = make_trainer(tmp_path, "flex", "--model.attn_mask_type=position_block_causal")
    batches = [input_dict for input_dict, _ in islice(trainer.dataloader, 100)]
    trainer.close()
    positions, tokens = (torch.cat([x[key] for x in batches]) for key in ("positions", "input"))
    is_start = torch.ones_like(tokens, dtype=torch.bool)
    is_start[:, 1:] = tokens[:, :-1] == trainer.tokenizer.eos_id
    assert is_start.sum() > len(tokens)
    assert (positions == 0).equal(is_start)


def test_newline_after_a_turns_end_of_text_belongs_to_the_chat_by_positions_only(tmp_path):
    """Chat templates end each turn with the end-of-text token and a newline."""

    def logits(name, batch, attn_type, mask_type):
        flags = "--training.dataset=c4_test", f"--model.attn_mask_type={mask_type}"
        trainer = make_trainer(tmp_path / name, attn_type, *flags)
        (outputs,) = trainer.forward_step(batch)
        trainer.close()
        return outputs.view(2, 12, -1)

    eos = 2043  # of the test tokenizer
    chats = torch.randint(eos, (2, 12), generator=torch.Generator().manual_seed(0))
    chats[:, 5] = chats[:, 11] = eos  # the end of the prompt, and of the answer
    alone = logits("alone", {"input": chats}, "sdpa", "causal")
    row = {"input": chats.view(1, 24)}
    positions = {"positions": torch.arange(12).repeat(2)[None]}
    by_eos = logits("eos", row, "flex", "block_causal")
    by_positions = logits("positions", row | positions, "flex", "position_block_causal")
    torch.testing.assert_close(by_positions, alone, **ROUNDING["float32"])
    torch.testing.assert_close(by_eos[:, :6], alone[:, :6], **ROUNDING["float32"])
    # docs/measured.md has this number.
    assert (by_eos - alone)[:, 6:].abs().max().item() == pytest.approx(0.12, abs=0.01)
