"""Separators and document ids, against a loop over tokens."""

from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.batch.documents import (
    PADDING,
    document_ids_from_positions,
    document_starts,
    last_tokens,
    positions_from_document_ids,
    read_document_ids,
)
from torchtitan.batch.mask import DocumentMask
from torchtitan.config.job_config import Model
from torchtitan.config.mask_types import MASK_TYPES

EOS = 2


def rows_of(elements):
    """Batches of up to 3 rows of one length, 1 to 12."""
    return st.integers(1, 12).flatmap(
        lambda length: st.lists(
            st.lists(elements, min_size=length, max_size=length), min_size=1, max_size=3
        )
    )


P = "position_block_causal"


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("positions", [[0, 1, 0]], [[0, 0, 1]] * 2),  # one row serves all rows
        ("cu_seqlens", [0, 2, 3, 6], [[0, 0, 1], [2, 2, 2]]),  # through the rows of the batch
        ("cu_seqlens", [[0, 2, 2], [0, 1, 3]], [[0, 0, PADDING], [0, 1, 1]]),
        ("seq_lens", [1, 2], [[0, 1, 1]]),  # of a single row
        # Padding and documents without a token have no number.
        ("positions", [[5, -1, 6], [-1, 3, 3]], [[0, PADDING, 1], [PADDING, 0, 1]]),
        ("seq_lens", [[1, 0, 1], [0, 3, 0]], [[0, 1, PADDING], [0, 0, 0]]),
    ],
)
def test_boundaries_are_read_and_a_single_source_is_no_reason_to_warn(key, value, expected, caplog):
    batch = {"input": torch.ones(len(expected), 3).long(), key: torch.tensor(value)}
    assert read_document_ids(batch, P, None).tolist() == expected
    assert caplog.messages == []


@pytest.mark.parametrize(
    "key, value, match",
    [
        ("document_ids", [[0, 1, 1, 1]], r"shape of its 'input', \(2, 3\).*got \(1, 4\)"),
        ("document_ids", [0, 1, 1, 0, 0, 0], r"got \(6,\); give one entry per token"),
        ("positions", [[0, 1]] * 2, r"shape of its 'input'.*got \(2, 2\)"),
        ("seq_lens", [1, 2, 3], r"row for each of the 2 rows of its 'input', got shape \(3,\)"),
        ("seq_lens", [[1, 2]], r"got shape \(1, 2\); give each row its documents"),
        ("cu_seqlens", [[0, 3, 6]], r"row for each of the 2 .*got shape \(1, 3\)"),
        ("seq_lens", [[1, 2], [2, 2]], "to 3 tokens at most, got 0 to 4"),
        ("cu_seqlens", [[0, 1, 3], [0, 2, 5]], "to 3 tokens at most, got 0 to 5"),
        ("cu_seqlens", [0, 3, 7], "to 6 tokens at most, got 0 to 7"),
        ("seq_lens", [[3, -1], [2, 1]], "must not be negative, .* shortest document of -1 tokens;"),
        ("cu_seqlens", [[0, 3, 0], [0, 2, 3]], "must go up .* shortest document of -3 tokens"),
        ("cu_seqlens", [2, 3, 6], "go up from 0 .* got 2 to 6"),
    ],
)
def test_boundaries_that_do_not_fit_the_input_are_named(key, value, match):
    batch = {"input": torch.ones(2, 3), key: torch.tensor(value)}
    with pytest.raises(ValueError, match=match) as error:
        read_document_ids(batch, "position_block_causal", EOS)
    assert key in str(error.value)


def test_explicit_boundaries_win_over_the_mask_type():
    sources = {
        "document_ids": ([[0, 1, 1]], [0, 1, 1]),
        "seq_lens": ([[2, 1]], [0, 0, 1]),
        "cu_seqlens": ([[0, 1, 2, 3]], [0, 1, 2]),
    }
    batch = {"input": torch.tensor([[EOS, EOS, 5]]), "positions": torch.tensor([[0, 1, 2]])}
    batch |= {key: torch.tensor(value) for key, (value, _) in sources.items()}
    for key, (_, expected) in sources.items():
        for mask_type in (P, "block_causal"):
            assert read_document_ids(batch, mask_type, EOS).tolist() == [expected]
        del batch[key]
    assert read_document_ids(batch, P, EOS).tolist() == [[0, 0, 0]]
    assert read_document_ids(batch, "block_causal", EOS).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "mask_type, eos_id, match",
    [
        (P, EOS, r"only \['input'\]; put 'positions' \[B, T\] into it.*'block_causal'"),
        ("block_causal", None, "the tokenizer is None .*set `engine.tokenizer`.*position_b"),
        ("blok", EOS, "model.attn_mask_type must be one of causal.*'blok'"),
    ],
)
def test_boundaries_that_cannot_be_read_are_named(mask_type, eos_id, match):
    with pytest.raises(ValueError, match=match):
        read_document_ids({"input": torch.ones(1, 3)}, mask_type, eos_id)


def test_every_mask_type_of_the_config_has_a_source_of_boundaries():
    literal, _ = get_args(get_type_hints(Model)["attn_mask_type"])
    assert get_args(literal) == tuple(MASK_TYPES)


@given(rows_of(st.integers(-1, 2)))
def test_positions_count_within_each_document(rows):
    ids = torch.tensor(rows, dtype=torch.int32)
    expected = []
    for row in rows:
        positions = []
        for i, value in enumerate(row):
            goes_on = i > 0 and row[i - 1] == value
            positions.append(PADDING if value == PADDING else positions[-1] + 1 if goes_on else 0)
        expected.append(positions)
    positions = positions_from_document_ids(ids)
    assert positions.tolist() == expected
    # Read back they say the same, whatever the documents were numbered.
    read_back = document_ids_from_positions(positions)
    assert torch.equal(document_starts(read_back), document_starts(ids))


@given(rows_of(st.integers(-1, 1)), st.integers(1, 4))
def test_chunks_begin_every_so_many_tokens_of_a_document(rows, chunk_size):
    ids = torch.tensor(rows)
    expected = []
    for positions in positions_from_document_ids(ids).tolist():
        count, chunks = -1, []
        for position in positions:
            count += position >= 0 and position % chunk_size == 0
            chunks.append(PADDING if position < 0 else count)
        expected.append(chunks)
    starts = DocumentMask.from_documents(ids).in_chunks(chunk_size).starts
    assert starts.dtype == torch.int32
    assert torch.equal(starts, document_starts(torch.tensor(expected)))


@given(rows_of(st.integers(-1, 2)))
def test_last_tokens_are_those_whose_next_token_is_of_another_document(rows):
    expected = [
        [value == PADDING or after not in (None, value) for value, after in pairwise([*row, None])]
        for row in rows
    ]
    assert last_tokens(torch.tensor(rows, dtype=torch.int32)).tolist() == expected


# ---- two sources in one batch ----


def two_rows(*second_row_positions):
    return {
        "input": torch.ones(2, 4, dtype=torch.long),
        "positions": torch.tensor([[0, 1, 0, 1], second_row_positions]),
        "seq_lens": torch.tensor([[2, 2], [4, 0]]),
    }


AGREES = two_rows(0, 1, 2, 3)  # positions that agree are there for RoPE
TWO_ROWS = torch.tensor([[5, EOS, 7, 8], [EOS, 7, EOS, 8]])
ROW = {"input": torch.tensor([[5, EOS, 7, 8]]), "positions": torch.arange(4)[None]}


@pytest.mark.parametrize(
    "batches, mask_type, eos_id, message",
    [
        (  # a second source that agrees
            [AGREES | {"cu_seqlens": torch.tensor([0, 2, 4, 8])}], P, None,
            "come from 'seq_lens'; the 'cu_seqlens' of the batch are ignored",
        ),
        (  # disagreement in a later batch
            [AGREES, AGREES, two_rows(0, 1, 0, 1), two_rows(0, 0, 0, 0)], P, None,
            "come from 'seq_lens'; the 'positions' of the batch are ignored, and they disagree: in row "
            "1 token 2 continues a document by 'seq_lens' and begins a document by 'positions'",
        ),
        (  # padding by only one of them
            [two_rows(0, 1, 2, -1)], P, None,
            "come from 'seq_lens'; the 'positions' of the batch are ignored, and they disagree: in row "
            "1 token 3 continues a document by 'seq_lens' and is padding by 'positions'",
        ),
        (
            [ROW], "block_causal", EOS,
            "come from 'end-of-text tokens'; the 'positions' of the batch are ignored, and they "
            "disagree: in row 0 token 2 begins a document by 'end-of-text tokens' and continues a "
            "document by 'positions'",
        ),
        (
            [
                {"input": torch.tensor([[5, EOS, 7]]), "positions": torch.tensor([[3, 4, 0]])},
                {"input": TWO_ROWS, "positions": torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])},
            ], P, EOS,
            "come from 'positions'; the 'end-of-text tokens' of the batch are ignored, and they "
            "disagree: in row 1 token 3 continues a document by 'positions' and begins a document by "
            "'end-of-text tokens'",
        ),
    ],
)  # fmt: skip
def test_second_source_is_warned_about_once(caplog, batches, mask_type, eos_id, message):
    source = message.split("'")[1]
    for batch in batches * 2:
        only = {key: batch[key] for key in ("input", source) if key in batch}
        ids = read_document_ids(batch, mask_type, eos_id)
        assert torch.equal(ids, read_document_ids(only, mask_type, eos_id))
    assert caplog.messages == [f"document boundaries {message}"]


@pytest.mark.parametrize(
    "tokens, positions",
    [
        ([5, 6, 7, 8], [0, 1, 0, 1]),  # no end-of-text token that says anything
        ([5, EOS, EOS, EOS, 6, 7], [0, 1, -1, -1, 0, 1]),  # nor of padding, whatever token fills it
        ([5, EOS, 9, 9, 6, 7], [0, 1, -1, -1, 0, 1]),
    ],
)
def test_end_of_text_tokens_say_nothing_of_padding_and_rows_without_one(caplog, tokens, positions):
    batch = {"input": torch.tensor([tokens]), "positions": torch.tensor([positions])}
    read_document_ids(batch, "position_block_causal", EOS)
    assert caplog.messages == []
