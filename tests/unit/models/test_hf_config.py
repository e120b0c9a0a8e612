"""From config.json to family, flavor and args, with the published numbers of known models."""

import dataclasses
import json
import sys

import pytest

from torchtitan.models.hf_config import from_hf_config, main
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols import train_spec
from torchtitan.tools.logging import saying_once_per

LLAMA_3_1_8B = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-05,
    max_position_embeddings=131072, eos_token_id=[128001, 128008], rope_theta=500000.0,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192, rope_type="llama3",
    ),
    tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip
LLAMA_3_2_1B = LLAMA_3_1_8B | dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
    rope_scaling=LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0}, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_3_2_3B = LLAMA_3_2_1B | dict(
    hidden_size=3072, num_attention_heads=24, num_hidden_layers=28, head_dim=128
)
QWEN = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064, rms_norm_eps=1e-06, max_position_embeddings=32768,
    rope_theta=1000000.0, use_sliding_window=False, sliding_window=131072,
)  # fmt: skip
QWEN_2_5_7B = QWEN | {"model_type": "qwen2"}
QWEN3_30B_A3B = QWEN | dict(
    model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_hidden_layers=48, num_attention_heads=32, head_dim=128, vocab_size=151936,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[], attention_bias=False, rope_scaling=None,
)  # fmt: skip
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_hidden_layers=61, first_k_dense_replace=3, num_attention_heads=128,
    num_key_value_heads=128, vocab_size=129280, rms_norm_eps=1e-06, max_position_embeddings=163840,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
    topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
    moe_layer_freq=1, num_nextn_predict_layers=1, rope_theta=10000,
    rope_scaling=dict(
        type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
)  # fmt: skip
MISTRAL_7B = dict(
    model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32768, rms_norm_eps=1e-05,
    max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None,
)  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B | dict(
    model_type="mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
    router_jitter_noise=0.0,
)  # fmt: skip
OLMO_3_7B = dict(
    model_type="olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, vocab_size=100278, rms_norm_eps=1e-06,
    max_position_embeddings=65536, attention_bias=False, rope_theta=500000,
    rope_scaling=dict(
        rope_type="yarn", factor=8.0, attention_factor=1.2079441541679836, beta_fast=32.0,
        beta_slow=1.0, original_max_position_embeddings=8192,
    ),
    sliding_window=4096,
)  # fmt: skip
# The file has no more of the text model.
GEMMA_3_4B = dict(
    model_type="gemma3", vision_config={"hidden_size": 1152}, eos_token_id=[1, 106],
    text_config=dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "config, family, flavor",
    [
        (LLAMA_3_1_8B, "llama3", "8B"),
        (LLAMA_3_2_1B, "llama3", "1B"),
        (LLAMA_3_2_3B, "llama3", None),
        (QWEN_2_5_7B, "qwen3", "Qwen2.5-7B"),
        (QWEN3_30B_A3B, "qwen3", "30B-A3B"),
        (DEEPSEEK_V3, "deepseek_v3", "671B"),
        (MISTRAL_7B, "mistral", "7B-v0.3"),
        (MIXTRAL_8X7B, "mistral", "Mixtral-8x7B"),
        (OLMO_3_7B, "olmo", "OLMo-3-7B"),
        (GEMMA_3_4B, "gemma3", "4B"),
    ],
)
def test_published_configs_find_their_flavor(config, family, flavor):
    match = from_hf_config(config)
    assert (match.family, match.flavor) == (family, flavor)


def test_numbers_without_a_flavor_become_args():
    args = from_hf_config(LLAMA_3_2_3B).model_args
    assert args.enable_weight_tying and args.rope_scaling_args.scaling_factor == 32
    assert (args.dim, args.ffn_hidden_dim, args.attention_head_dim) == (3072, 8192, 128)
    assert args.eos_id == 128001
    assert args is not from_hf_config(LLAMA_3_2_3B).model_args


@pytest.mark.parametrize(
    "name, value",
    [("rope_theta", 1e4), ("rope_scaling", None), ("intermediate_size", 11008), ("head_dim", 64)],
)
def test_one_other_number_is_another_model(name, value):
    assert from_hf_config(LLAMA_3_1_8B | {name: value}).flavor is None


# `tests/reference/test_families_transformers.py` has the fields of other families.
@pytest.mark.parametrize("config, change, message", [
    (LLAMA_3_1_8B, {"model_type": "mamba"}, "'mamba'.* known are deepseek_v2, deepseek_v3"),
    (LLAMA_3_1_8B, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
    (LLAMA_3_1_8B, {"vocab_size": None}, "lacks vocab_size"),
    (QWEN_2_5_7B, {"use_sliding_window": True}, "= True.*qwen models have no sliding windows"),
    (QWEN_2_5_7B, {"layer_types": ["sliding_attention"]}, "layer_types"),
    (QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias = True.* no biases"),
    (QWEN3_30B_A3B, {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
    (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave = False"),
    (OLMO_3_7B, {"layer_types": ["full_attention"]}, "it must have 32 of full_attention"),
    (GEMMA_3_4B, {"text_config": 1}, "text_config = 1"),
    (GEMMA_3_4B["text_config"], {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
])  # fmt: skip
def test_what_a_family_cannot_express_is_named(config, change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(config | change)


def test_window_that_a_mistral_config_leaves_out_is_that_of_its_class():
    absent = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    args = from_hf_config(absent).model_args
    assert args.kind_of(0)[1].window == 4096 and args.attn_type == "flex"
    assert from_hf_config(MISTRAL_7B).model_args.kind_of(0)[1].window is None


def test_text_model_takes_from_the_multimodal_config_what_its_own_lacks():
    args = from_hf_config(GEMMA_3_4B).model_args
    assert args.eos_id == 1 and args.enable_weight_tying
    untied = GEMMA_3_4B | {"tie_word_embeddings": False}
    assert not from_hf_config(untied).model_args.enable_weight_tying
    untied["text_config"] = untied["text_config"] | {"tie_word_embeddings": True, "eos_token_id": 5}
    args = from_hf_config(untied).model_args
    assert args.eos_id == 5 and args.enable_weight_tying


def test_field_that_no_row_reads_is_warned_of_unless_it_says_no(caplog):
    with saying_once_per(set()):
        from_hf_config(MISTRAL_7B | {"use_new_thing": False, "attention_dropout": 0.0})
        assert not caplog.records
        from_hf_config(MISTRAL_7B | {"use_new_thing": True, "attention_dropout": 0.1})
    assert "mistral has fields that are not read: use_new_thing, attention_dropout;" in caplog.text


SMALL = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=100, rms_norm_eps=1e-5, max_position_embeddings=128,
    intermediate_size=128,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"hidden_size": True},
        {"hidden_size": 64.0},
        {"rms_norm_eps": float("nan")},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"rope_type": "llama3", "factor": "a"}},
        {"attention_bias": "no"},
        {"eos_token_id": []},
        {"model_type": ["llama"]},
    ],
)
def test_number_that_is_none_of_a_model_is_named_with_the_file(tmp_path, change):
    from_hf_config(SMALL)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | change))
    with pytest.raises(ValueError) as raised:
        from_hf_config(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("model_type", ["llama4_text", "gpt_oss", "qwen3", "deepseek_v3"])
def test_a_million_million_layers_are_refused_before_they_are_listed(model_type):
    with pytest.raises(ValueError, match="num_hidden_layers = 1000000000000"):
        from_hf_config(SMALL | {"model_type": model_type, "num_hidden_layers": 10**12})


def test_command_prints_flavor_or_what_differs(tmp_path, capsys, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_1_8B))
    monkeypatch.setattr(sys, "argv", ["hf_config", str(file)])
    main()
    assert capsys.readouterr().out == "family: llama3\nflavor: 8B\n"
    file.write_text(json.dumps(LLAMA_3_1_8B | {"rope_theta": 1e6, "vocab_size": 100}))
    monkeypatch.setattr(sys, "argv", ["hf_config", str(tmp_path)])
    main()
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith("the nearest is 8B, which differs in")
    assert [line.strip() for line in out[2:]] == [
        "vocab_size: 128256 in 8B, 100 in the config",
        "rope_theta: 500000 in 8B, 1000000.0 in the config",
    ]
    monkeypatch.setattr(sys, "argv", ["hf_config", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match="error: .*none.json cannot be read"):
        main()


def test_size_that_is_registered_is_a_flavor(monkeypatch):
    monkeypatch.setattr(train_spec, "_extra_train_specs", {})
    family, flavor, model_args = from_hf_config(LLAMA_3_2_3B)
    assert flavor is None
    spec = train_spec.get_train_spec(family)
    flavors = {**spec.model_args, "3B": model_args}
    train_spec.register_train_spec("llama3", dataclasses.replace(spec, model_args=flavors))
    assert from_hf_config(LLAMA_3_2_3B) == ("llama3", "3B", model_args)
    assert "3B" not in llama3_args
