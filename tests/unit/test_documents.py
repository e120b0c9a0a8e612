"""Separators and document ids, against a loop over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.models.documents import (
    PADDING,
    DocumentIdSeparator,
    EosSeparator,
    LengthsSeparator,
    PositionSeparator,
    choose_separator,
    document_ids_from_cu_seqlens,
    document_ids_from_eos,
    document_ids_from_lengths,
    document_ids_from_positions,
    document_starts,
)

EOS = 2


def rows_of(elements):
    """Batches of up to 3 rows of one length, 1 to 12."""
    return st.integers(1, 12).flatmap(
        lambda length: st.lists(
            st.lists(elements, min_size=length, max_size=length), min_size=1, max_size=3
        )
    )


def test_eos_belongs_to_the_document_it_closes():
    tokens = torch.tensor([[5, 6, EOS, 7, EOS, 8]])
    assert document_ids_from_eos(tokens, EOS).tolist() == [[0, 0, 0, 1, 1, 2]]


def test_position_resets_begin_documents_wherever_a_row_starts():
    positions = torch.tensor([[4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10]])
    expected = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert document_ids_from_positions(positions).tolist() == expected


def test_repeated_position_begins_a_document_of_one_token():
    positions = torch.tensor([[0, 0, 0, 1]])
    assert document_ids_from_positions(positions).tolist() == [[0, 1, 2, 2]]


def test_negative_positions_are_padding_and_take_no_number():
    positions = torch.tensor([[-1, 0, 1, -1, -1, 0, 1], [-3, -2, -1, 0, 1, 2, -1]])
    assert document_ids_from_positions(positions).tolist() == [
        [PADDING, 0, 0, PADDING, PADDING, 1, 1],
        [PADDING, PADDING, PADDING, 0, 0, 0, PADDING],
    ]


def test_lengths_leave_the_rest_of_a_row_as_padding():
    ids = document_ids_from_lengths(torch.tensor([[2, 3], [1, 0]]), seq_len=6)
    assert ids.tolist() == [[0, 0, 1, 1, 1, PADDING], [0] + [PADDING] * 5]


def test_empty_documents_take_no_number():
    ids = document_ids_from_lengths(torch.tensor([0, 2, 0, 0, 1]), seq_len=3)
    assert ids.tolist() == [[0, 0, 1]]


def slow_ids(row, begins, is_padding):
    ids, count, previous_was_padding = [], -1, False
    for i, value in enumerate(row):
        if is_padding(value):
            ids.append(PADDING)
            previous_was_padding = True
            continue
        if i == 0 or previous_was_padding or begins(row[i - 1], value):
            count += 1
        previous_was_padding = False
        ids.append(count)
    return ids


@given(rows_of(st.integers(0, 3)))
def test_eos_ids_equal_a_loop_over_tokens(rows):
    expected = [slow_ids(r, lambda before, _: before == EOS, lambda _: False) for r in rows]
    ids = document_ids_from_eos(torch.tensor(rows), EOS)
    assert ids.dtype == torch.int32 and ids.tolist() == expected


@given(rows_of(st.integers(-2, 4)))
def test_position_ids_equal_a_loop_over_tokens(rows):
    expected = [
        slow_ids(r, lambda before, here: here != before + 1, lambda here: here < 0) for r in rows
    ]
    ids = document_ids_from_positions(torch.tensor(rows))
    assert ids.dtype == torch.int32 and ids.tolist() == expected


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=3))
def test_length_ids_equal_documents_laid_end_to_end(rows):
    expected = []
    for lengths in rows:
        documents = [length for length in lengths if length]
        row = [i for i, length in enumerate(documents) for _ in range(length)]
        expected.append(row + [PADDING] * (12 - len(row)))
    ids = document_ids_from_lengths(torch.tensor(rows), seq_len=12)
    assert ids.dtype == torch.int32 and ids.tolist() == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_lengths_and_positions_that_mean_the_same_give_the_same_ids(lengths):
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    # A document of one token after another of one: positions 0, 0. All boundaries show.
    assert torch.equal(
        document_ids_from_positions(positions),
        document_ids_from_lengths(torch.tensor(lengths), total),
    )


@given(rows_of(st.integers(-1, 2)))
def test_starts_allow_exactly_the_pairs_of_one_document(rows):
    ids = torch.tensor(rows, dtype=torch.int32)
    starts = document_starts(ids)
    for row, start in zip(rows, starts.tolist(), strict=True):
        for q in range(len(row)):
            first = q
            while row[q] != PADDING and first > 0 and row[first - 1] == row[q]:
                first -= 1
            assert start[q] == first


def test_input_is_left_as_it_was():
    tokens = torch.tensor([[1, EOS, 1]])
    positions = torch.tensor([[0, -1, 0]])
    document_ids_from_eos(tokens, EOS)
    document_ids_from_positions(positions)
    assert tokens.tolist() == [[1, EOS, 1]] and positions.tolist() == [[0, -1, 0]]


def test_separators_read_their_entry_of_the_batch():
    tokens = torch.tensor([[5, EOS, 7, 8]])
    expected = [[0, 0, 1, 1]]
    positions = torch.tensor([[0, 1, 0, 1]])
    ids = torch.tensor([[0, 0, 1, 1]])
    for separator, batch in (
        (EosSeparator(EOS), {}),
        (PositionSeparator(), {"positions": positions}),
        (LengthsSeparator(), {"seq_lens": torch.tensor([[2, 2]])}),
        (LengthsSeparator(), {"cu_seqlens": torch.tensor([[0, 2, 4]])}),
        (DocumentIdSeparator(), {"document_ids": ids}),
    ):
        found = separator.document_ids({"input": tokens, **batch})
        assert found.dtype == torch.int32 and found.tolist() == expected


def test_one_row_of_positions_serves_all_rows():
    batch = {"input": torch.ones(2, 3), "positions": torch.tensor([[0, 1, 0]])}
    assert PositionSeparator().document_ids(batch).tolist() == [[0, 0, 1]] * 2


def test_flat_cu_seqlens_count_through_the_rows_of_the_batch():
    batch = {"input": torch.ones(2, 3), "cu_seqlens": torch.tensor([0, 2, 3, 6])}
    starts = document_starts(LengthsSeparator().document_ids(batch))
    assert starts.tolist() == [[0, 0, 2], [0, 0, 0]]


def test_missing_positions_name_the_entry_and_what_the_batch_has():
    with pytest.raises(ValueError, match=r"'positions'.*\['input'\].*model.attn_mask_type"):
        PositionSeparator().document_ids({"input": torch.ones(1, 3)})


def test_explicit_boundaries_win_over_the_mask_type():
    some = torch.ones(1, 3)
    chosen = choose_separator({"document_ids": some, "seq_lens": some}, "block_causal", EOS)
    assert chosen == DocumentIdSeparator()
    assert choose_separator({"cu_seqlens": some}, "position_block_causal", None) == (
        LengthsSeparator()
    )
    assert choose_separator({"positions": some}, "block_causal", EOS) == EosSeparator(EOS)
    assert choose_separator({}, "position_block_causal", EOS) == PositionSeparator()


def test_block_causal_without_an_end_of_text_id_says_what_to_do():
    with pytest.raises(ValueError, match="end-of-text id.*position_block_causal"):
        choose_separator({}, "block_causal", None)


def test_cu_seqlens_that_stop_early_leave_padding():
    ids = document_ids_from_cu_seqlens(torch.tensor([[0, 2, 3]], dtype=torch.int32), seq_len=5)
    assert ids.tolist() == [[0, 0, 1, PADDING, PADDING]]
