"""gpt_oss against Hugging Face's GptOssForCausalLM on the same weights, fp32."""

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
from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs, GptOssStateDictAdapter
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 4, 4, 2, 16, 48
EXPERTS, TOP_K, WINDOW, LIMIT = 8, 4, 8, 1.5


def hf_model():
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        sliding_window=WINDOW,
        swiglu_limit=LIMIT,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).float().eval()
    with torch.no_grad():  # away from ones and zeros, and large enough to reach the limit
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name or "router" in name:
                parameter.copy_(("norm" in name) + 0.5 * torch.randn_like(parameter))
            elif "experts" in name:
                parameter.mul_(10)
    return model


def our_args(**changes):
    sizes = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "head_dim": HEAD_DIM,
        "moe_inter_dim": HIDDEN,
        "sliding_window_size": WINDOW,
        "swiglu_limit": LIMIT,
        "rope_theta": 1000.0,
        "rope_factor": 8.0,
        "original_seq_len": 256,
        "max_seq_len": 64,
        "moe_args": MoEArgs(
            num_experts=EXPERTS,
            num_shared_experts=0,
            score_func="softmax",
            route_norm=True,
            gate_bias=True,
            score_before_experts=False,
            top_k=TOP_K,
        ),
    }
    return GptOssModelArgs(**sizes | changes)


def loaded(args, weights):
    lacking = [f"layers.{i}.moe.expert_bias" for i in range(LAYERS)]  # not in HF's router
    return load_into(GptOssModel(args), GptOssStateDictAdapter(args, None), weights, lacking)


@pytest.mark.parametrize("use_grouped_mm", [True, False])
def test_logits_and_export_equal_hugging_face(use_grouped_mm, tmp_path):
    args = our_args()
    args.moe_args.use_grouped_mm = use_grouped_mm
    check_logits_and_export(hf_model(), partial(loaded, args), tmp_path, tolerance=2e-5)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(attn_type):
    reference = hf_model()
    args = our_args(attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, reference.state_dict())
    check_packed_equals_separate(reference, model, tolerance=2e-5)


def test_three_adamw_steps_have_the_losses_and_first_gradients_of_hugging_face():
    reference = hf_model()
    model, adapter = loaded(our_args(), reference.state_dict())
    theirs, ours = check_three_adamw_steps(reference, model)
    ours = adapter.to_hf(ours)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-5, msg=name)
