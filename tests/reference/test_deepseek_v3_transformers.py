"""deepseek_v3 against Hugging Face's DeepseekV3ForCausalLM and DeepseekV2ForCausalLM, fp32."""

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
    random_tokens,
)
from torchtitan.models.deepseek_v3 import (
    DeepSeekV3Model,
    DeepSeekV3ModelArgs,
    DeepSeekV3StateDictAdapter,
)
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

DIM, LAYERS, HEADS, EXPERTS = 32, 3, 4, 8
# Our name of a size -> (HF's name, value).
SIZES = {
    "dim": ("hidden_size", DIM),
    "inter_dim": ("intermediate_size", 48),
    "moe_inter_dim": ("moe_intermediate_size", 24),
    "n_layers": ("num_hidden_layers", LAYERS),
    "n_dense_layers": ("first_k_dense_replace", 1),
    "n_heads": ("num_attention_heads", HEADS),
    "vocab_size": ("vocab_size", VOCAB),
    "kv_lora_rank": ("kv_lora_rank", 16),
    "qk_nope_head_dim": ("qk_nope_head_dim", 12),
    "qk_rope_head_dim": ("qk_rope_head_dim", 8),
    "v_head_dim": ("v_head_dim", 10),
}
# The original length is longer than any text here: YaRN holds below it, too.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
GROUPED = {"num_expert_groups": 4, "num_limited_groups": 2}
VERSIONS = {
    "v3 grouped, latent queries": {
        "hf": {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        "moe": {**GROUPED, "route_norm": True},
    },
    "v3 direct queries": {
        "hf": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "moe": {},
    },
    "v2 grouped": {
        "hf": {
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
        "moe": {**GROUPED, "group_score": "max", "score_func": "softmax"},
    },
}


def hf_model(version):
    kind = "V2" if version.startswith("v2") else "V3"
    config = getattr(transformers, f"Deepseek{kind}Config")(
        **dict(SIZES.values()),
        **VERSIONS[version]["hf"],
        num_key_value_heads=HEADS,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope_parameters=dict(YARN),
        initializer_range=0.1,  # experts' scores differ, and outputs are of order 1
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"Deepseek{kind}ForCausalLM")(config).eval()
    perturb_norms_and_biases(model)
    return model


def our_args(version, **changes):
    sizes = {ours: size for ours, (_, size) in SIZES.items()}
    moe_args = MoEArgs(
        num_experts=EXPERTS,
        num_shared_experts=2,
        top_k=3,
        route_scale=2.5,
        score_before_experts=False,
        **VERSIONS[version]["moe"],
    )
    return DeepSeekV3ModelArgs(
        **sizes,
        q_lora_rank=VERSIONS[version]["hf"]["q_lora_rank"] or 0,
        moe_args=moe_args,
        max_seq_len=40,
        rope_theta=YARN["rope_theta"],
        rope_factor=YARN["factor"],
        beta_fast=YARN["beta_fast"],
        beta_slow=YARN["beta_slow"],
        mscale=YARN["mscale_all_dim"],
        original_seq_len=YARN["original_max_position_embeddings"],
        **changes,
    )


def loaded(args, weights):
    """The adapter writes the names that these weights have; V2 has no routing bias."""
    has_bias = any("correction_bias" in name for name in weights)
    lacking = [] if has_bias else [f"layers.{i}.moe.expert_bias" for i in range(1, LAYERS)]
    adapter = DeepSeekV3StateDictAdapter(args, None).spelled_like(weights)
    return load_into(DeepSeekV3Model(args), adapter, weights, lacking)


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_and_export_equal_hugging_face(version, tmp_path):
    load = partial(loaded, our_args(version))
    check_logits_and_export(hf_model(version), load, tmp_path, tolerance=2e-5)


def test_yarn_and_correction_bias_matter_here():
    """Otherwise the test above would not see them."""
    version = "v3 grouped, latent queries"
    weights, tokens = hf_model(version).state_dict(), random_tokens(2, 40)
    without_bias = {n: t * (0 if "correction" in n else 1) for n, t in weights.items()}
    plain_rope = our_args(version)
    plain_rope.rope_factor = 1
    pairs = [
        (our_args(version), weights),
        (our_args(version), without_bias),
        (plain_rope, weights),
    ]
    with torch.no_grad():
        first, *others = (loaded(args, state)[0](tokens) for args, state in pairs)
    assert all((other - first).abs().max() > 0.01 for other in others)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(attn_type):
    version = "v3 grouped, latent queries"
    reference = hf_model(version)
    args = our_args(version, attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, reference.state_dict())
    check_packed_equals_separate(reference, model, tolerance=2e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(version):
    reference = hf_model(version)
    model, _ = loaded(our_args(version), reference.state_dict())
    check_three_adamw_steps(reference, model, lr=1e-3)
