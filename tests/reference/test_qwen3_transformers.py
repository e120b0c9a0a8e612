"""qwen3 against Hugging Face's Qwen3ForCausalLM and Qwen2ForCausalLM on the same weights, fp32."""

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
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter

transformers = pytest.importorskip("transformers")

DIM, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48
GENERATIONS = ["qwen2", "qwen3"]


def head_dim_of(generation):
    """Qwen 3's head size is independent of the model dim."""
    return 16 if generation == "qwen3" else DIM // HEADS


def hf_model(generation, tied=False):
    config_cls, model_cls = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[generation]
    config = config_cls(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        # Small, so that slow pairs of a head turn visibly within 40 positions, too.
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        **({"head_dim": head_dim_of(generation)} if generation == "qwen3" else {}),
    )
    torch.manual_seed(0)
    model = model_cls(config).eval()
    perturb_norms_and_biases(model)
    return model


def our_args(generation, **changes):
    sizes = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "head_dim": head_dim_of(generation),
        "hidden_dim": FFN,
        "rope_theta": 1000.0,
        "max_seq_len": 64,
        "qk_norm": generation == "qwen3",
        "qkv_bias": generation == "qwen2",
    }
    return Qwen3ModelArgs(**sizes | changes)


def loaded(args, weights):
    return load_into(Qwen3Model(args), Qwen3StateDictAdapter(args, None), weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_logits_and_export_equal_hugging_face(generation, tied, tmp_path):
    load = partial(loaded, our_args(generation, enable_weight_tying=tied))
    reference = hf_model(generation, tied)
    files = check_logits_and_export(reference, load, tmp_path, tolerance=1e-5)
    assert ("lm_head.weight" in files) != tied


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_packed_documents_have_the_log_probs_of_documents_alone(generation, attn_type):
    reference = hf_model(generation)
    args = our_args(generation, attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, reference.state_dict())
    check_packed_equals_separate(reference, model, tolerance=5e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(generation, tied):
    reference = hf_model(generation, tied)
    model, _ = loaded(our_args(generation, enable_weight_tying=tied), reference.state_dict())
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    check_three_adamw_steps(reference, model)
