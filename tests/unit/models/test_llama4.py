"""What llama4 has of its own: layers without RoPE, chunks, temperature, bad values."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from tests.unit.models.tiny import filled, on_meta, sized
from torchtitan.batch.mask import DocumentMask
from torchtitan.config import JobConfig
from torchtitan.distributed.context_parallel import ContextPart
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.models.llama4 import (
    Llama4StateDictAdapter,
    Transformer,
    TransformerModelArgs,
    llama4_args,
)
from torchtitan.models.moe import MoEArgs


def tiny_args(**changes):
    sizes = {"n_kv_heads": 2, "multiple_of": 8, "fixed_attn_block_size": 4, "attn_type": "flex"}
    return sized(TransformerModelArgs, moe_args=MoEArgs(num_experts=4), **sizes | changes)


def meta_model(args):
    return on_meta(Transformer, args)


def tiny_model(**changes):
    return filled(Transformer(tiny_args(**changes)))


def test_every_expert_has_the_full_width_without_auto_scaling():
    assert tiny_args(dim=96, multiple_of=1).expert_hidden_dim == 128
    assert tiny_args(dim=96, multiple_of=1, auto_scale_hidden_dim=False).expert_hidden_dim == 256
    assert tiny_args(moe_inter_dim=24).expert_hidden_dim == 24


# ---- layers without RoPE ----


def test_every_nth_layer_is_without_positions_counted_as_in_hugging_face():
    model = meta_model(tiny_args(n_layers=8, every_n_layers_nope=4))
    attentions = [layer.attention for layer in model.layers.values()]
    assert [a.mask_name for a in attentions] == ["rope", "rope", "rope", "nope"] * 2
    assert [a.apply_rope is None for a in attentions] == [False, False, False, True] * 2


def test_only_layers_without_positions_carry_what_lies_before_the_chunk():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    changed = tokens.index_fill(1, torch.tensor([0]), 9)
    for interval, first_that_is_equal in ((None, 4), (2, None)):
        model = tiny_model(every_n_layers_nope=interval)
        masks = model.get_attention_masks(tokens, None)
        with torch.no_grad():
            difference = model(tokens, masks) - model(changed, masks)
        differs = (difference.abs().amax(-1) > 0)[0].tolist()
        assert differs == [i < (first_that_is_equal or 8) for i in range(8)]


# ---- chunks ----

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0], [5, 6, 0, 1, 2, 3, 4, 0, -1]])
# The documents of POSITIONS, cut into chunks of 3 tokens.
CHUNKS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 2, 2, 3, 4]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 2, 3]])


def pairs_of(ids):
    """bool [B, T, T]: True where a query sees a key."""
    return (ids[:, :, None] == ids[:, None, :]).tril()


def allowed_by(block_mask, n_rows):
    row = torch.arange(n_rows)[:, None, None]
    query, key = torch.arange(9)[:, None], torch.arange(9)
    return block_mask.mask_mod(row, torch.tensor(0), query, key).expand(n_rows, 9, 9)


def test_flex_masks_keep_chunks_and_documents_apart():
    model = meta_model(tiny_args(fixed_attn_block_size=3, attn_mask_type="position_block_causal"))
    masks = model.get_attention_masks(torch.ones(2, 9), None, {"positions": POSITIONS})
    assert masks.keys() == {"rope", "nope"}
    assert torch.equal(allowed_by(masks["rope"], 2), pairs_of(CHUNKS))
    assert torch.equal(allowed_by(masks["nope"], 2), pairs_of(DOCUMENTS))


def test_varlen_masks_keep_chunks_and_documents_apart():
    model = meta_model(
        tiny_args(
            fixed_attn_block_size=3, attn_type="varlen", attn_mask_type="position_block_causal"
        )
    )
    masks = model.get_attention_masks(torch.ones(2, 9), None, {"positions": POSITIONS})
    assert masks["rope"].cu_seq_q.tolist() == [0, 3, 6, 8, 9, 11, 14, 16, 17, 18]
    assert masks["nope"].cu_seq_q.tolist() == [0, 8, 9, 11, 16, 17, 18]
    assert (masks["rope"].max_q, masks["nope"].max_q) == (3, 8)


def test_sdpa_equals_flex_within_a_chunk_and_refuses_more():
    flex, sdpa = tiny_model(), tiny_model(attn_type="sdpa")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = flex(tokens[:, :4], flex.get_attention_masks(tokens[:, :4], None))
        torch.testing.assert_close(sdpa(tokens[:, :4]), expected)
    with pytest.raises(ValueError, match="'sdpa'.*chunks of 4 tokens.*rows of 8.*'flex'"):
        sdpa(tokens)


def test_sdpa_refuses_padded_rows_and_rows_of_which_a_rank_holds_less_than_a_chunk():
    sdpa = tiny_model(attn_type="sdpa")
    over_two_ranks = DocumentMask(part=ContextPart(SimpleNamespace(cp=2), "alltoall"))
    with pytest.raises(ValueError, match="chunks of 4 tokens apart, got rows of 6"):
        sdpa(torch.arange(3)[None], over_two_ranks)
    with pytest.raises(ValueError, match="chunks of 4 tokens apart, got rows of 6"):
        sdpa(torch.arange(6)[None], torch.ones(1, 6))


def test_sdpa_with_rows_beyond_a_chunk_is_a_config_error():
    config = JobConfig()
    config.training.seq_len = 8193
    args = copy.deepcopy(llama4_args["debugmodel"])
    with pytest.raises(ValueError, match="rows of 8193.*training.seq_len to at most 8192"):
        args.update_from_config(config)
    config.model.attn_type = "varlen"
    args.update_from_config(config)
    assert args.max_seq_len == 8193


@pytest.mark.parametrize("attn_type", ["flex", "sdpa"])
def test_cached_forward_has_the_logits_of_the_full_one(attn_type):
    changes = {"n_layers": 3, "every_n_layers_nope": 3, "attn_temperature_tuning": True}
    model = tiny_model(**changes, floor_scale=2)
    tokens = torch.randint(0, 64, (2, 11))
    with torch.no_grad():
        expected = model(tokens, model.get_attention_masks(tokens, None))
        cached = tiny_model(**changes, floor_scale=2, attn_type=attn_type)
        with kv_cache(cached, 11) as forward:
            pieces = [forward(part) for part in tokens.split([6, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


# ---- temperature ----


def test_temperature_is_a_column_of_the_table():
    plain = tiny_model().freqs_cis
    tuning = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5}
    table = tiny_model(**tuning).freqs_cis
    assert torch.equal(table[:, :-1], plain)
    steps = (torch.arange(64) + 1) // 4
    torch.testing.assert_close(table[:, -1], 1 + 0.5 * torch.log(1 + steps).to(table.dtype))
    assert meta_model(tiny_args(**tuning)).freqs_cis.shape == table.shape


# ---- bad values ----


@pytest.mark.parametrize(
    "name, value, least",
    [
        ("every_n_layers_nope", 1, 2),
        ("every_n_layers_nope", 0, 2),
        ("interleave_moe_layer_step", 0, 1),
        ("fixed_attn_block_size", 0, 1),
        ("floor_scale", 0, 1),
    ],
)
def test_bad_value_is_named(name, value, least):
    with pytest.raises(ValueError, match=f"{name}.*at least {least}, got {value}"):
        meta_model(tiny_args(**{name: value}))


# ---- weights of Hugging Face ----


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_files_are_written_with_the_names_that_the_index_has(prefix, tmp_path):
    head = f"{prefix}lm_head.weight"
    index = {"weight_map": {head: "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = Llama4StateDictAdapter(tiny_args(), str(tmp_path))
    state = tiny_model().state_dict()
    files = adapter.to_hf(state)
    assert all(name.startswith((f"{prefix}model.", head)) for name in files)
    assert files[f"{prefix}model.layers.1.feed_forward.experts.gate_up_proj"].shape == (4, 32, 96)
    assert files[f"{prefix}model.layers.0.feed_forward.up_proj.weight"].shape == (88, 32)
    back = adapter.from_hf(files)
    assert back.keys() == state.keys() - {"layers.1.moe.expert_bias"}
    assert all(torch.equal(back[name], state[name]) for name in back)
