"""llama3 against Hugging Face's LlamaForCausalLM on the same random weights, fp32."""

from functools import partial

import pytest
import torch

from tests.reference.comparison import (
    VOCAB,
    check_logits_and_export,
    check_packed_equals_separate,
    check_three_adamw_steps,
    load_into,
    perturb_norms_and_biases,
)
from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs

transformers = pytest.importorskip("transformers")

DIM, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48


def hf_model(tied=False, bias=False, head_dim=8):
    """Scaling of RoPE as in Llama 3.1, squeezed so that 40 positions meet all three bands."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        intermediate_size=FFN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    perturb_norms_and_biases(model)
    return model


def our_args(tied=False, bias=False, head_dim=8):
    args = TransformerModelArgs(
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        vocab_size=VOCAB,
        rope_theta=500000,
        max_seq_len=64,
        hidden_dim=FFN,
        head_dim=head_dim,
        attention_bias=bias,
        mlp_bias=bias,
        enable_weight_tying=tied,
    )
    args.rope_scaling_args.original_max_position_embeddings = 64
    return args


def loaded(args, weights):
    return load_into(Transformer(args), Llama3StateDictAdapter(args, None), weights)


VARIANTS = [
    {},
    {"tied": True},
    {"bias": True},
    {"head_dim": 16, "tied": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_and_export_equal_hugging_face(variant, tmp_path):
    load = partial(loaded, our_args(**variant))
    check_logits_and_export(hf_model(**variant), load, tmp_path, tolerance=1e-5)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(attn_type):
    reference, args = hf_model(), our_args()
    args.attn_type, args.attn_mask_type = attn_type, "position_block_causal"
    model, _ = loaded(args, reference.state_dict())
    check_packed_equals_separate(reference, model, tolerance=5e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_three_adamw_steps_have_the_losses_of_hugging_face(tied):
    reference = hf_model(tied=tied)
    model, _ = loaded(our_args(tied=tied), reference.state_dict())
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    check_three_adamw_steps(reference, model)


def test_rows_are_reordered_as_known():
    args = TransformerModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=4)
    adapter = Llama3StateDictAdapter(args, None)
    rows = torch.arange(16.0)
    ours, theirs = "layers.0.attention.wq", "model.layers.0.self_attn.q_proj"
    to_hf = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    from_hf = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    for kind, tensor in (("weight", rows[:, None].expand(16, 16)), ("bias", rows)):
        there = adapter.to_hf({f"{ours}.{kind}": tensor})[f"{theirs}.{kind}"]
        back = adapter.from_hf({f"{theirs}.{kind}": tensor})[f"{ours}.{kind}"]
        assert there.view(16, -1)[:, 0].tolist() == to_hf
        assert back.view(16, -1)[:, 0].tolist() == from_hf


def test_unknown_keys_are_listed_on_either_side():
    adapter = Llama3StateDictAdapter(our_args(), None)
    with pytest.raises(ValueError, match=r"2 key.*self_attn.q_norm.weight, model.vision"):
        adapter.from_hf({"model.layers.0.self_attn.q_norm.weight": None, "model.vision": None})
    with pytest.raises(ValueError, match=r"1 key.*layers.0.moe.router.gate.weight"):
        adapter.to_hf({"layers.0.moe.router.gate.weight": None})


def test_stored_rotary_table_is_skipped():
    adapter = Llama3StateDictAdapter(our_args(), None)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    assert adapter.from_hf({name: torch.ones(4)}) == {}
    assert adapter.ignores_hf_key(name) and not adapter.ignores_hf_key("lm_head.weight")
    assert Llama3StateDictAdapter(our_args(tied=True), None).ignores_hf_key("lm_head.weight")
