"""What trainer, validator and engine do with documents in a batch."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.batch.dummy_microbatches import zero_loss
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config.job_config import Training
from torchtitan.config.mask_types import MASK_TYPES, MaskType
from torchtitan.step import runner as step_runner

EOS = 2
TOKENIZER = SimpleNamespace(eos_id=EOS)


def policy(mask_type="block_causal", attn_type="flex", tokenizer=TOKENIZER, **training):
    args = SimpleNamespace(attn_type=attn_type, attn_mask_type=mask_type)
    return DocumentPolicy.from_job(Training(**training), args, tokenizer)


def ignored(policy, batch):
    """Columns of a one-row batch whose label is left out."""
    labels = torch.arange(10, 10 + batch["input"].shape[1])[None]
    masked = policy.mask_labels(batch, labels)
    assert torch.equal(masked[masked != IGNORE_INDEX], labels[masked != IGNORE_INDEX])
    return (masked[0] == IGNORE_INDEX).nonzero().flatten().tolist()


TOKENS = torch.tensor([[5, EOS, 7, 8, 9, EOS]])


class Model:
    asked_with = None

    def get_attention_masks(self, input_batch, tokenizer, extra_inputs):
        assert input_batch is TOKENS
        self.asked_with = extra_inputs
        return "masks"


def model_inputs(policy, batch, model=None):
    """(other entries, keywords) for the model's forward."""
    packed = policy.token_batch(batch, TOKENS + 1)
    inputs, labels, entries, keywords = step_runner.model_inputs(policy, packed, model or Model())
    assert inputs is batch["input"] and labels is packed.labels
    return entries, keywords


POSITIONS = torch.tensor([[3, 4, 0, 1, 0, 1]])


@pytest.mark.parametrize(
    "mask_type, batch, columns",
    [
        ("block_causal", {}, [1, 5]),
        ("block_causal", {"input": TOKENS[:, :-1]}, [1]),  # the row's next token is unknown
        ("position_block_causal", {"positions": POSITIONS}, [1, 3]),
        ("block_causal", {"seq_lens": torch.tensor([[4, 2]])}, [3]),
        ("block_causal", {"document_ids": torch.tensor([[0, 0, -1, -1, 1, -1]])}, [1, 2, 3, 4, 5]),
        ("block_causal", {"attention_masks": "own"}, []),
    ],
)
def test_labels_of_padding_and_of_documents_last_tokens_are_left_out(mask_type, batch, columns):
    assert ignored(policy(mask_type), {"input": TOKENS} | batch) == columns


def test_mask_type_of_another_token_is_a_row_of_the_table(monkeypatch):
    monkeypatch.setitem(MASK_TYPES, "begins", MaskType("begin-of-text tokens", "bos_id", True))
    begins = policy("begins", tokenizer=SimpleNamespace(eos_id=9, bos_id=EOS))
    batch = {"input": TOKENS[:, :-1]}
    assert begins.document_ids(batch).tolist() == [[0, 1, 1, 1, 1]]
    labels = TOKENS[:, 1:]  # the last one begins a document
    masked = begins.mask_labels(batch, labels)
    assert masked.tolist() == [[IGNORE_INDEX, 7, 8, 9, IGNORE_INDEX]]
    with pytest.raises(ValueError, match="read from begin-of-text tokens, .* has no bos_id"):
        policy("begins").document_ids(batch)


def test_row_of_the_data_loader_ends_its_last_document_by_the_end_of_text_token():
    tokens = TOKENS.clone()
    batch = {"input": tokens, "document_ids": torch.tensor([[0, 0, 0, 0, 1, 1]])}
    assert ignored(policy(), batch) == [3]
    tokens.sample_ids = torch.tensor([[0, 1]])
    assert ignored(policy(), batch) == [3, 5]


@pytest.mark.parametrize(
    "mask_type, setting, masks",
    [
        ("causal", None, False),
        ("causal", True, True),
        ("block_causal", None, True),
        ("block_causal", False, False),
    ],
)
def test_boundaries_are_masked_by_default_where_documents_are_kept_apart(mask_type, setting, masks):
    attn_type = "sdpa" if mask_type == "causal" else "flex"
    chosen = policy(mask_type, attn_type, mask_boundary_loss=setting)
    assert ignored(chosen, {"input": TOKENS}) == ([1, 5] if masks else [])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_tokens_and_positions_that_are_no_whole_numbers_are_refused(dtype):
    wrong = torch.ones(1, 6, dtype=dtype)
    for batch in ({"input": wrong}, {"input": TOKENS, "positions": wrong}):
        with pytest.raises(ValueError, match=f"must be whole numbers, got a tensor of {dtype}"):
            TokenBatch.from_dict(batch)


def test_labels_are_masked_in_a_copy_and_those_that_are_not_ignored_count():
    labels = torch.zeros_like(TOKENS)
    masked = policy().mask_labels({"input": TOKENS}, labels)
    assert TokenBatch.from_dict({"input": TOKENS}, masked).num_valid == 4
    assert labels.count_nonzero() == 0


def attended_pairs(policy, batch):
    return policy.attended_pairs(policy.token_batch(batch))


def test_attended_pairs_are_the_squares_of_document_lengths():
    assert attended_pairs(policy(), {"input": TOKENS}) == 2**2 + 4**2
    padded = {"input": TOKENS, "seq_lens": torch.tensor([[3, 1]])}
    assert attended_pairs(policy(), padded) == 3**2 + 1**2
    assert attended_pairs(policy("causal", "sdpa"), {"input": TOKENS}) == 6**2


@pytest.mark.parametrize(
    "chosen, entries, expected",
    [
        (policy(), {}, {"positions": [[0, 1, 0, 1, 2, 3]]}),
        (policy(), {"positions": POSITIONS}, {"positions": POSITIONS.tolist()}),
        (
            policy(),
            {"seq_lens": torch.tensor([[4, 2]]), "weights": "kept"},  # boundaries stay outside
            {"positions": [[0, 1, 2, 3, 0, 1]], "weights": "kept"},
        ),
        (policy(restart_positions=False), {}, {}),
        (policy("causal", "flex"), {}, {}),
    ],
)
def test_model_gets_positions_that_restart_with_each_document(chosen, entries, expected):
    extra_inputs, _ = model_inputs(chosen, {"input": TOKENS} | entries)
    found = {k: x.tolist() if isinstance(x, torch.Tensor) else x for k, x in extra_inputs.items()}
    assert found == expected


@pytest.mark.parametrize("mask_type", ["block_causal", "position_block_causal"])
def test_masks_are_made_of_document_ids_alone_unless_the_batch_has_its_own(mask_type):
    model, batch = Model(), {"input": TOKENS, "positions": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    _, extra_kwargs = model_inputs(policy(mask_type), batch, model)
    assert extra_kwargs == {"attention_masks": "masks"}
    asked_with = {k: x.tolist() for k, x in model.asked_with.items()}
    assert asked_with == {"document_ids": [[0, 0, 1, 1, 1, 1]]}
    own = {"input": TOKENS, "attention_masks": "own"}
    assert model_inputs(policy(mask_type), own) == ({"attention_masks": "own"}, {})


def test_boundaries_under_a_causal_mask_are_said_to_be_unused(caplog):
    batch = {"input": TOKENS, "document_ids": torch.zeros(1, 6).long()}
    for _ in range(2):
        model_inputs(policy("causal", "sdpa"), batch)
    (message,) = caplog.messages
    assert "'document_ids' separate no documents" in message and "'block_causal'" in message


@pytest.mark.parametrize("attn_type", ["sdpa", "flex"])
def test_positions_that_restart_under_a_causal_mask_are_warned_of_once(caplog, attn_type):
    for positions in (
        [3, 4, 5, 6, 8, 9],  # a row may begin anywhere and leave positions out
        [-1, -1, 0, 1, 2, -1],  # and padding, negative, is no document
        [0, 1, 2, -1, 0, 1],
        [0, 0, 1, 2, 3, 4],
    ):
        batch = {"input": TOKENS, "positions": torch.tensor([positions])}
        model_inputs(policy("causal", attn_type), batch)
    (message,) = caplog.messages
    assert message.startswith("the batch's 'positions' restart in row 0 at token 4, but under")
    assert "set it to 'position_block_causal', with model.attn_type 'flex' or 'varlen'" in message


def test_restarts_are_no_matter_where_documents_are_kept_apart_by_other_means(caplog):
    batch = {"input": TOKENS, "positions": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    model_inputs(policy(), batch)
    model_inputs(policy("causal"), batch | {"attention_masks": "own"})
    assert caplog.messages == []


# ---- rows ----


def test_rows_are_split_with_their_labels_and_what_belongs_to_all_is_shared():
    rows = torch.arange(10).view(5, 2)
    batch = {
        "input": rows,
        "positions": rows + 1,
        "cu_seqlens": torch.tensor([[0, 1, 2]]).expand(5, -1),
        "row": [0, 1, 2, 3, 4],
        "offsets": torch.zeros(1, 2),
        "scale": torch.tensor(3.0),
        "source": "text5",
        "names": ["a", "b"],
    }
    batches = TokenBatch.from_dict(batch, rows + 2).split(2)
    assert [part.tokens.tolist() for part in batches] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9]],
    ]
    for packed in batches:
        part = packed.as_dict()
        assert torch.equal(part["positions"], part["input"] + 1)
        assert torch.equal(packed.labels, part["input"] + 2)
        assert part["row"] == (part["input"][:, 0] // 2).tolist()
        assert part["offsets"].shape == (1, 2) and part["scale"] == 3
        assert part["cu_seqlens"].shape == (len(part["input"]), 3)
        assert part["source"] == "text5" and part["names"] == ["a", "b"]


def test_batch_that_needs_no_split_stays_one():
    batch = TokenBatch.from_dict({"input": TOKENS, "attention_masks": "own"}, TOKENS)
    assert batch.split(8) == batch.split(1) == [batch]


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention_masks", "own"),
        ("cu_seqlens", torch.tensor([0, 3, 8])),
        ("cu_seqlens", torch.tensor([0, 2, 4, 8])),  # as many entries as rows
        ("seq_lens", torch.tensor([[1, 1]])),
    ],
)
def test_what_cannot_be_split_by_rows_is_named(key, value):
    batch = {"input": torch.zeros(4, 2).long(), key: value}
    with pytest.raises(ValueError, match=f"{key}.*give a list of microbatches"):
        TokenBatch.from_dict(batch).split(2)


def test_padding_for_context_parallelism_ends_lengths_that_count_through_all_rows():
    two_ranks = ContextSharding(SimpleNamespace(size=lambda: 2), None, "allgather")
    for lengths in ([[0, 1, 3], [0, 3, 3]], [0, 1, 3, 6]):
        batch = {"input": torch.ones(2, 3).long(), "cu_seqlens": torch.tensor(lengths)}
        padded = two_ranks.pad(policy().token_batch(batch))
        assert (padded.document_ids == -1).tolist() == [[False] * 3 + [True]] * 2
        if batch["cu_seqlens"].dim() == 2:
            assert padded.entries["cu_seqlens"] is batch["cu_seqlens"]
        else:
            assert padded.entries.keys() == {"document_ids"}
            assert torch.equal(padded.entries["document_ids"], padded.document_ids)


def test_padding_for_context_parallelism_counts_nowhere():
    two_ranks = ContextSharding(SimpleNamespace(size=lambda: 2), "headtail", "allgather")
    rows = {"input": torch.ones(2, 3).long(), "positions": torch.arange(3)[None]}
    rows |= {"loss_weights": torch.ones(2, 3), "scores": torch.ones(2, 3, 5)}
    others = {"seq_lens": torch.tensor([[1, 2, 0], [3, 0, 0]]), "offset": torch.tensor(3)}
    others["names"] = ["a", "b"]
    padded = two_ranks.pad(TokenBatch.from_dict(rows | others, torch.full((2, 3), 5)))
    assert padded.tokens.tolist() == [[1, 1, 1, 0]] * 2
    assert padded.labels.tolist() == [[5, 5, 5, IGNORE_INDEX]] * 2
    assert padded.entries["positions"].tolist() == [[0, 1, 2, -1]]  # of all rows
    assert padded.entries["loss_weights"].tolist() == [[1, 1, 1, 0]] * 2
    assert padded.entries["scores"].shape == (2, 4, 5)
    assert all(padded.entries[key] is value for key, value in others.items())


def test_loss_of_a_filler_is_0_where_its_outputs_add_up_to_an_overflow():
    outputs = torch.full((2, 3), 3e38, requires_grad=True)
    loss = zero_loss(outputs)
    loss.backward()
    assert loss == 0 and not outputs.grad.any()
