"""What llama4 has of its own: chunks, cached attention, bad values."""

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.unit.models.tiny import filled, on_meta, sized
from torchtitan.batch.mask import DocumentMask
from torchtitan.config import JobConfig
from torchtitan.distributed.context_parallel import ContextPart
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.models.llama4 import Transformer, TransformerModelArgs, llama4_args
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
    for length, mask in ((3, over_two_ranks), (6, torch.ones(1, 6))):
        with pytest.raises(ValueError, match="chunks of 4 tokens apart, got rows of 6"):
            sdpa(torch.arange(length)[None], mask)


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
