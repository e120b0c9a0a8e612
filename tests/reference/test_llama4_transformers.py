"""llama4 against Hugging Face's Llama4ForCausalLM on the same weights, fp32."""

from functools import partial

import pytest
import torch

from tests.reference.comparison import (
    VOCAB,
    check_logits_and_export,
    check_packed_equals_separate,
    check_three_adamw_steps,
    load_into,
)
from torchtitan.models.llama4 import Llama4StateDictAdapter, Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

# Layers 1 and 3 have experts; layer 2 has no RoPE and sees past the chunks of 8 tokens.
DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 4, 2, 8
DENSE_FFN, EXPERT_FFN, EXPERTS, CHUNK, NOPE_INTERVAL = 64, 24, 4, 8, 3

# Small enough that 40 positions have ten different temperatures.
TUNED = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3}
VARIANTS = [
    {"use_qk_norm": False, "attn_temperature_tuning": False},
    {"use_qk_norm": True, "attn_temperature_tuning": False},
    {"use_qk_norm": True, **TUNED},
]
TWO_OF_FOUR = {"use_qk_norm": False, **TUNED, "top_k": 2}


def hf_model(top_k=1, **variant):
    config = transformers.Llama4TextConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=EXPERT_FFN,
        intermediate_size_mlp=DENSE_FFN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=top_k,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=NOPE_INTERVAL,
        attention_chunk_size=CHUNK,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        # Small, so that slow pairs of a head turn visibly within 40 positions, too.
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=None,
        **variant,
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    assert config.no_rope_layers == [1, 1, 0, 1] and config.moe_layers == [1, 3]
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for name, parameter in model.named_parameters():
            parameter.add_((0.1 if "norm" in name else 0.05) * torch.randn_like(parameter))
    return model


def our_args(top_k=1, **changes):
    sizes = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "head_dim": HEAD_DIM,
        "hidden_dim": DENSE_FFN,
        "moe_inter_dim": EXPERT_FFN,
        "moe_args": MoEArgs(num_experts=EXPERTS, top_k=top_k),
        "every_n_layers_nope": NOPE_INTERVAL,
        "fixed_attn_block_size": CHUNK,
        "rope_theta": 1000.0,
        "max_seq_len": 64,
        "attn_type": "flex",
    }
    return TransformerModelArgs(**sizes | changes)


def loaded(args, weights):
    lacking = ["layers.1.moe.expert_bias", "layers.3.moe.expert_bias"]  # not in HF's router
    return load_into(Transformer(args), Llama4StateDictAdapter(args, None), weights, lacking)


@pytest.mark.parametrize("variant", [*VARIANTS, TWO_OF_FOUR])
def test_logits_and_export_equal_hugging_face(variant, tmp_path):
    load = partial(loaded, our_args(**variant))
    check_logits_and_export(hf_model(**variant), load, tmp_path, tolerance=1e-5)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_have_the_log_probs_of_documents_alone(variant, attn_type):
    reference = hf_model(**variant)
    args = our_args(attn_type=attn_type, attn_mask_type="position_block_causal", **variant)
    model, _ = loaded(args, reference.state_dict())
    check_packed_equals_separate(reference, model, tolerance=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(variant):
    reference = hf_model(**variant)
    model, _ = loaded(our_args(**variant), reference.state_dict())
    check_three_adamw_steps(reference, model)


def test_weights_of_the_multimodal_class_are_read_without_its_images():
    text = hf_model(**VARIANTS[0]).state_dict()
    files = {f"language_model.{name}": tensor for name, tensor in text.items()}
    files["vision_model.layernorm_pre.weight"] = torch.ones(3)
    files["multi_modal_projector.linear_1.weight"] = torch.ones(3)
    model, adapter = loaded(our_args(), files)
    spelled = adapter.spelled_like(files).to_hf(model.state_dict())
    assert spelled.keys() == {name for name in files if name.startswith("language_model.")}
    assert adapter.to_hf(model.state_dict()).keys() == text.keys()
