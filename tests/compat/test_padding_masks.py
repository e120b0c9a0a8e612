"""Rows of one document and padding, with the mask that padded batches come with: [B, T] of 0 and 1."""

import dataclasses

import pytest
import torch

from torchtitan.batch.documents import document_ids_from_padding_mask
from torchtitan.models.gpt_oss import get_train_spec as gpt_oss_spec
from torchtitan.models.llama3 import get_train_spec as llama3_spec

LENGTHS = [5, 12, 1]
SEQ_LEN = 12


SIZES = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=32)
WINDOWS = dict(attn_type="flex", head_dim=8, moe_inter_dim=16, sliding_window_size=4)


def tiny_model(kind):
    has_windows = kind == "windows"
    spec = gpt_oss_spec() if has_windows else llama3_spec()
    args = spec.model_args["debugmodel_small" if has_windows else "debugmodel"]
    own = WINDOWS if has_windows else {"attn_type": kind}
    args = dataclasses.replace(args, **SIZES, **own)
    torch.manual_seed(0)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    return model


def padded_rows(side):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (len(LENGTHS), SEQ_LEN), generator=generator)
    column = torch.arange(SEQ_LEN)
    rows = [column < n if side == "right" else column >= SEQ_LEN - n for n in LENGTHS]
    mask = torch.stack(rows).to(torch.int32)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return tokens, mask, positions


def logits_of_documents(model, tokens, mask):
    """Each row's document by itself, as a mask of ones."""
    for row, row_mask in zip(tokens, mask, strict=True):
        document = row[row_mask.bool()][None]
        yield model(document, attention_masks=torch.ones_like(document, dtype=torch.int32))[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["sdpa", "flex", "varlen", "windows"])
def test_padded_rows_give_each_documents_logits(kind, side):
    model = tiny_model(kind)
    tokens, mask, positions = padded_rows(side)
    logits = model(tokens, attention_masks=mask, positions=positions)
    for row, expected in enumerate(logits_of_documents(model, tokens, mask)):
        torch.testing.assert_close(logits[row][mask[row].bool()], expected, rtol=1e-5, atol=1e-5)
    # Padding is finite, and so are all gradients.
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_padding_between_tokens_is_refused():
    with pytest.raises(ValueError, match="beginning or the end of a row"):
        document_ids_from_padding_mask(torch.tensor([[1, 1, 0, 1]]))


def test_rows_of_padding_alone_and_of_tokens_alone_are_allowed():
    ids = document_ids_from_padding_mask(torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0]]))
    assert ids.tolist() == [[-1, -1, -1], [0, 0, 0], [-1, 0, -1]]
