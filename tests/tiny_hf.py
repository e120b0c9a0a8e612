"""Tiny Hugging Face models to compare with: two layers, 32 channels, 64 tokens."""

from typing import Any

import torch

VOCAB = 64
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
QWEN_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
QWEN3_5 = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
)  # fmt: skip
QWEN3_5_EXPERTS = QWEN_EXPERTS | {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN_EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", QWEN3_5 | QWEN3_5_EXPERTS),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
}


def tiny_hf_config(family: str = "qwen3", **changes: Any) -> Any:
    """Return a config of a family in `FAMILIES`. changes: of its fields."""
    import transformers

    name, more = FAMILIES[family]
    return getattr(transformers, name)(**{**SIZES, **more, **changes})


def tiny_hf_model(
    family: str = "qwen3", *, is_critic: bool = False, seed: int = 0, **changes: Any
) -> Any:
    """Return an fp32 model with random weights that differ from 0 and 1 and distinguish tokens.

    is_critic: one value per token in place of logits. changes: of its config.
    """
    import transformers

    auto = transformers.AutoModelForCausalLM
    if is_critic:
        auto = transformers.AutoModelForTokenClassification
        changes = dict(num_labels=1, classifier_dropout=0.0) | changes
    torch.manual_seed(seed)
    config = tiny_hf_config(family, **changes)
    model = auto.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif not name.endswith("A_log"):
                parameter.mul_(3)
    return model
