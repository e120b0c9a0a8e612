"""Models built from transformers' config.json and weights compute what transformers' models do."""

import dataclasses
import json

import pytest
import torch

from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.models.hf_config import from_hf_config
from torchtitan.protocols.train_spec import get_train_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-5, max_position_embeddings=64,
)  # fmt: skip
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
THETA = dict(rope_type="default", rope_theta=1000.0)
STRETCHED = THETA | {"original_max_position_embeddings": 16}
LLAMA3_ROPE = STRETCHED | dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0
)
DEEPSEEK_YARN = STRETCHED | dict(
    rope_type="yarn", factor=8.0, beta_fast=4, beta_slow=1, mscale=0.7, mscale_all_dim=0.7
)
GPT_OSS_YARN = STRETCHED | dict(
    rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, truncate=False
)
DEEPSEEK = dict(
    num_key_value_heads=4, rms_norm_eps=1e-6, moe_intermediate_size=16, n_routed_experts=8,
    n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1, kv_lora_rank=16,
    q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    rope_parameters=DEEPSEEK_YARN, attn_implementation="eager",
)  # fmt: skip

# name -> family, class of the config, its arguments beside SIZES
PLAIN, WIDE = dict(rope_parameters=THETA), dict(rope_parameters=THETA, head_dim=16)
LLAMA4 = dict(
    rope_parameters=LLAMA3_ROPE, head_dim=16, intermediate_size_mlp=64, interleave_moe_layer_step=2,
    attention_chunk_size=32, num_local_experts=6, num_experts_per_tok=1,
)  # fmt: skip
GPT_OSS = EXPERTS | dict(
    rope_parameters=GPT_OSS_YARN, head_dim=16, sliding_window=8, attn_implementation="eager"
)
LLAMA32 = dict(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, head_dim=16)
QWEN3_MOE = WIDE | EXPERTS | dict(moe_intermediate_size=16, norm_topk_prob=True)
DEEPSEEK_V3 = DEEPSEEK | dict(q_lora_rank=24, n_group=4, topk_group=2)
CASES = {
    "llama": ("llama3", "LlamaConfig", PLAIN),
    "llama_3.2": ("llama3", "LlamaConfig", LLAMA32),
    "llama_biased": ("llama3", "LlamaConfig", PLAIN | dict(attention_bias=True, mlp_bias=True)),
    "qwen2": ("qwen3", "Qwen2Config", PLAIN | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", "Qwen3Config", WIDE),
    "qwen3_moe": ("qwen3", "Qwen3MoeConfig", QWEN3_MOE),
    "deepseek_v2": ("deepseek_v3", "DeepseekV2Config", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", DEEPSEEK_V3),
    "llama4": ("llama4", "Llama4TextConfig", LLAMA4),
    "gpt_oss": ("gpt_oss", "GptOssConfig", GPT_OSS),
}


def hf_model(case):
    family, config_cls, arguments = CASES[case]
    arguments = dict(arguments)
    attention = arguments.pop("attn_implementation", None)
    config = getattr(transformers, config_cls)(**SIZES | arguments)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().float()


def our_model(folder):
    """(family, model) of the config and the weights in a folder."""
    match = from_hf_config(folder)
    spec = get_train_spec(match.family)
    args = dataclasses.replace(
        match.model_args, attn_type="varlen", attn_mask_type="position_block_causal"
    )
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
        load_from_hf(model.state_dict(), spec.state_dict_adapter(args, None), str(folder))
    return match.family, model.eval().float()


def logits_of(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    masks = model.get_attention_masks(tokens, None, {"positions": positions})
    return model(tokens, attention_masks=masks)


@pytest.mark.parametrize("fused", [False, True], ids=["hub_files", "fused_files"])
@pytest.mark.parametrize("case", CASES)
def test_model_of_a_saved_folder_has_the_logits_of_hugging_face(case, fused, tmp_path):
    if fused and case not in ("qwen3_moe", "deepseek_v3"):
        pytest.skip("has one layout")
    reference = hf_model(case)
    reference.save_pretrained(tmp_path, save_original_format=not fused)
    family, model = our_model(tmp_path)
    assert family == CASES[case][0]
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = logits_of(model, tokens), reference(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())
    for assets, name in ((tmp_path, "copied_config"), (None, "config_from_args")):
        export = tmp_path / name
        spec = get_train_spec(family)
        adapter = spec.state_dict_adapter(model.model_args, assets and str(assets))
        save_to_hf(model.state_dict(), adapter, str(export))
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            export, attn_implementation=reference.config._attn_implementation
        )
        assert opened.dtype == torch.float32
        with torch.no_grad():
            assert (opened(tokens).logits - theirs).abs().max() <= 1e-5, name
    read, written = (
        json.loads((f / "config.json").read_text())
        for f in (tmp_path, export.parent / "copied_config")
    )
    # The layer that predicts a second token is not exported.
    expected = read | {key: 0 for key in ("num_nextn_predict_layers",) if key in read}
    assert expected.items() <= written.items()


@pytest.mark.parametrize("case", CASES)
def test_config_in_memory_and_in_its_file_say_the_same(case, tmp_path):
    family, config_cls, arguments = CASES[case]
    config = getattr(transformers, config_cls)(**SIZES | arguments)
    config.save_pretrained(tmp_path)
    match = from_hf_config(config.to_dict())
    assert from_hf_config(tmp_path / "config.json") == match
    assert (match.family, match.flavor) == (family, None)
    older = json.loads((tmp_path / "config.json").read_text())
    rope = older.pop("rope_parameters")
    older["rope_theta"] = rope.pop("rope_theta")
    older["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    assert from_hf_config(older) == match
