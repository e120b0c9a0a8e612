"""Rows of one document and padding, with the mask that padded batches come with: [B, T] of 0 and 1."""

import pytest
import torch

from tests.unit.models.tiny import filled, sized
from torchtitan.batch.documents import document_ids_from_padding_mask
from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

LENGTHS = [5, 12, 1]
SEQ_LEN = 12
WINDOWS = dict(attn_type="flex", head_dim=8, moe_inter_dim=16, sliding_window_size=4)


def tiny_model(kind):
    if kind == "windows":
        return filled(GptOssModel(sized(GptOssModelArgs, n_kv_heads=4, **WINDOWS)))
    return filled(Transformer(sized(TransformerModelArgs, attn_type=kind)))


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


def test_rows_may_be_padding_or_tokens_alone_and_have_no_padding_between_tokens():
    with pytest.raises(ValueError, match="beginning or the end of a row"):
        document_ids_from_padding_mask(torch.tensor([[1, 1, 0, 1]]))
    ids = document_ids_from_padding_mask(torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0]]))
    assert ids.tolist() == [[-1, -1, -1], [0, 0, 0], [-1, 0, -1]]
