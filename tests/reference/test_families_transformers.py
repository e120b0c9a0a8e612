"""Every family against its class in transformers on the same random weights, fp32.

Our arguments are read from transformers' config, so that sizes stand here once.
"""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.reference.comparison import (
    VOCAB,
    check_packed_equals_separate,
    check_three_adamw_steps,
    load_into,
    logits_of,
    perturb_norms_and_biases,
    random_tokens,
)
from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.models.hf_config import from_hf_config
from torchtitan.models.llama3 import Llama3StateDictAdapter, TransformerModelArgs
from torchtitan.protocols.train_spec import get_train_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=256,
)  # fmt: skip
# Small, so that slow pairs of a head turn visibly within 40 positions, too.
THETA = {"rope_type": "default", "rope_theta": 1000.0}
# As in Llama 3.1, squeezed so that 40 positions meet all three bands.
BANDS = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
    high_freq_factor=4.0, original_max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = dict(num_hidden_layers=2, head_dim=8, rms_norm_eps=1e-5, rope_parameters=BANDS)
QWEN = dict(num_hidden_layers=2, rms_norm_eps=1e-6, rope_parameters=THETA)
QWEN_EXPERTS = dict(
    num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)
# The original length is longer than any text here: YaRN holds below it, too.
YARN = dict(
    rope_type="yarn", rope_theta=100.0, factor=8.0, beta_fast=4, beta_slow=1, mscale=0.7,
    mscale_all_dim=0.7, original_max_position_embeddings=64,
)  # fmt: skip
DEEPSEEK = dict(
    num_hidden_layers=3, num_key_value_heads=4, moe_intermediate_size=24, first_k_dense_replace=1,
    kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=8,
    n_shared_experts=2, num_experts_per_tok=3, routed_scaling_factor=2.5, rms_norm_eps=1e-6,
    initializer_range=0.1,  # experts' scores differ, and outputs are of order 1
    rope_parameters=YARN,
)  # fmt: skip
GROUPS = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}
# Layers 1 and 3 have experts; layer 2 has no RoPE and sees past the chunks of 8 tokens.
LLAMA4 = dict(
    num_hidden_layers=4, head_dim=8, intermediate_size=24, intermediate_size_mlp=64,
    num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
    no_rope_layers=[1, 1, 0, 1], attention_chunk_size=8, rms_norm_eps=1e-5, rope_parameters=THETA,
    pad_token_id=None, use_qk_norm=True, attn_temperature_tuning=False,
)  # fmt: skip
# Small enough that 40 positions have ten different temperatures.
TUNED = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3}
GPT_OSS_YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
    truncate=False, original_max_position_embeddings=256,
)  # fmt: skip
GPT_OSS = dict(
    num_hidden_layers=4, head_dim=16, num_local_experts=8, num_experts_per_tok=4,
    sliding_window=8, swiglu_limit=1.5, rms_norm_eps=1e-5, rope_parameters=GPT_OSS_YARN,
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
V3 = "deepseek_v3, grouped, latent queries"
# name -> class in transformers, its arguments
CASES = {
    "llama3": ("Llama", LLAMA3),
    "llama3, tied": ("Llama", LLAMA3 | TIED),
    "llama3, biased": ("Llama", LLAMA3 | {"attention_bias": True, "mlp_bias": True}),
    "llama3, wide heads": ("Llama", LLAMA3 | TIED | {"head_dim": 16}),
    "qwen2": ("Qwen2", QWEN),
    "qwen2, tied": ("Qwen2", QWEN | TIED),
    "qwen3": ("Qwen3", QWEN | {"head_dim": 16}),
    "qwen3, tied": ("Qwen3", QWEN | TIED | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", QWEN | QWEN_EXPERTS | {"head_dim": 16}),
    V3: ("DeepseekV3", DEEPSEEK | GROUPS | {"norm_topk_prob": True}),
    "deepseek_v3, direct queries": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK | GROUPS | {"topk_method": "group_limited_greedy"}),
    "llama4": ("Llama4", LLAMA4 | {"use_qk_norm": False}),
    "llama4, normed": ("Llama4", LLAMA4),
    "llama4, tuned": ("Llama4", LLAMA4 | TUNED),
    "llama4, two experts": (
        "Llama4",
        LLAMA4 | TUNED | {"use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "gpt_oss": ("GptOss", GPT_OSS),
}
PACKED = ["llama3", "qwen2", "qwen3", V3, "llama4", "llama4, normed", "llama4, tuned", "gpt_oss"]
DOCUMENTS = {"attn_mask_type": "position_block_causal"}
# Of experts sums are longer.
TOLERANCE = {"DeepseekV3": 2e-5, "DeepseekV2": 2e-5, "GptOss": 2e-5}


def hf_config(case):
    cls, arguments = CASES[case]
    config_cls = getattr(transformers, f"{cls}{'Text' if cls == 'Llama4' else ''}Config")
    attention = {"attn_implementation": "eager"} if cls == "GptOss" else {}
    return config_cls(**SIZES | arguments, **attention)


def hf_model(case):
    cls, _ = CASES[case]
    is_llama4 = cls == "Llama4"
    torch.manual_seed(0)
    model = getattr(transformers, f"{cls}ForCausalLM")(hf_config(case)).float().eval()
    if cls not in ("Llama4", "GptOss"):
        perturb_norms_and_biases(model)
        return model
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for name, parameter in model.named_parameters():
            if is_llama4:
                parameter.add_((0.1 if "norm" in name else 0.05) * torch.randn_like(parameter))
            elif any(part in name for part in ("norm", "bias", "sinks", "router")):
                parameter.copy_(("norm" in name) + 0.5 * torch.randn_like(parameter))
            elif "experts" in name:
                parameter.mul_(10)  # large enough to reach the limit
    return model


def loaded(reference, weights, **changes):
    """Return our model of a config of transformers, with these weights, and their adapter."""
    match = from_hf_config(reference.config.to_dict())
    spec = get_train_spec(match.family)
    if match.family in ("llama4", "gpt_oss"):
        changes = {"attn_type": "flex"} | changes
    args = dataclasses.replace(match.model_args, max_seq_len=64, **changes)
    model = spec.model_cls(args)
    adapter = spec.state_dict_adapter(args, None).spelled_like(weights)
    # Only the routers of DeepSeek-V3 have a bias in files.
    has_bias = any("correction_bias" in name for name in weights)
    biases = [name for name in model.state_dict() if name.endswith("expert_bias")]
    return load_into(model, adapter, weights, lacking=[] if has_bias else biases)


def opened(folder, reference):
    auto, attention = transformers.AutoModelForCausalLM, reference.config._attn_implementation
    return auto.from_pretrained(folder, attn_implementation=attention).eval()


@pytest.mark.parametrize(
    ("case", "is_fused"), [*((case, False) for case in CASES), ("qwen3_moe", True), (V3, True)]
)
def test_folder_gives_the_logits_of_hugging_face_and_exports_open_there(case, is_fused, tmp_path):
    """is_fused: with stacked experts, as transformers holds them, in place of the hub's files."""
    reference, tolerance = hf_model(case), TOLERANCE.get(CASES[case][0], 1e-5)
    reference.save_pretrained(tmp_path, save_original_format=not is_fused)
    files = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in files) != reference.config.tie_word_embeddings
    match = from_hf_config(tmp_path)
    spec = get_train_spec(match.family)
    args = dataclasses.replace(match.model_args, **DOCUMENTS, attn_type="varlen")
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    load_from_hf(model.state_dict(), spec.state_dict_adapter(args, None), str(tmp_path))
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours = logits_of(model, tokens, torch.arange(40).expand(2, -1))
        theirs = reference(tokens).logits
    assert theirs.std() > 0.1, "logits too small for the tolerance to tell anything"
    assert (ours - theirs).abs().max() <= tolerance
    for assets, name in ((tmp_path, "copied_config"), (None, "config_from_args")):
        adapter = spec.state_dict_adapter(args, assets and str(assets))
        save_to_hf(model.state_dict(), adapter, str(tmp_path / name))
        export = opened(tmp_path / name, reference)
        assert export.dtype == torch.float32
        with torch.no_grad():
            assert (export(tokens).logits - theirs).abs().max() <= 1e-5, name
    exported = adapter.spelled_like(files).to_hf(model.state_dict())
    assert exported.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name
    read, of_export = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path, tmp_path / "copied_config")
    )
    # The layer that predicts a second token is not exported.
    expected = read | {key: 0 for key in ("num_nextn_predict_layers",) if key in read}
    assert expected.items() <= of_export.items()


@pytest.mark.parametrize("case", CASES)
def test_config_in_memory_and_in_its_file_say_the_same(case, tmp_path):
    config = hf_config(case)
    config.save_pretrained(tmp_path)
    match = from_hf_config(config.to_dict())
    assert from_hf_config(tmp_path / "config.json") == match
    assert match.flavor is None
    older = json.loads((tmp_path / "config.json").read_text())
    rope = older.pop("rope_parameters")
    older["rope_theta"] = rope.pop("rope_theta")
    older["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    assert from_hf_config(older) == match


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_have_the_log_probs_of_documents_alone(case, attn_type):
    reference = hf_model(case)
    model, _ = loaded(reference, reference.state_dict(), attn_type=attn_type, **DOCUMENTS)
    check_packed_equals_separate(reference, model, TOLERANCE.get(CASES[case][0], 1e-5))


@pytest.mark.parametrize("case", [case for case in CASES if case != "llama4, two experts"])
def test_three_adamw_steps_have_the_losses_of_hugging_face(case):
    reference = hf_model(case)
    model, adapter = loaded(reference, reference.state_dict())
    is_tied = model.output.weight is model.tok_embeddings.weight
    assert is_tied == reference.config.tie_word_embeddings
    lr = 1e-3 if case.startswith("deepseek") else 1e-2
    theirs, ours = check_three_adamw_steps(reference, model, lr)
    if case == "gpt_oss":
        ours = adapter.to_hf(ours)
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-5, msg=name)


def test_yarn_and_correction_bias_matter_here():
    """Otherwise the tests above would not see them."""
    reference, tokens = hf_model(V3), random_tokens(2, 40)
    weights = reference.state_dict()
    without_bias = {n: t * (0 if "correction" in n else 1) for n, t in weights.items()}
    models = [
        loaded(reference, weights),
        loaded(reference, without_bias),
        loaded(reference, weights, rope_factor=1),
    ]
    with torch.no_grad():
        first, *others = (model(tokens) for model, _ in models)
    assert all((other - first).abs().max() > 0.01 for other in others)


def test_weights_of_the_multimodal_class_are_read_without_its_images():
    reference = hf_model("llama4")
    text = reference.state_dict()
    files = {f"language_model.{name}": tensor for name, tensor in text.items()}
    files["vision_model.layernorm_pre.weight"] = torch.ones(3)
    files["multi_modal_projector.linear_1.weight"] = torch.ones(3)
    model, adapter = loaded(reference, files)
    written = adapter.to_hf(model.state_dict())
    assert written.keys() == {name for name in files if name.startswith("language_model.")}
    _, plain = loaded(reference, text)
    assert plain.to_hf(model.state_dict()).keys() == text.keys()


# ---- the adapter of llama3 by hand ----


def llama3_adapter(**changes):
    args = TransformerModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=4, **changes)
    return Llama3StateDictAdapter(args, None)


def test_rows_are_reordered_as_known():
    adapter = llama3_adapter()
    rows = torch.arange(16.0)
    ours, theirs = "layers.0.attention.wq", "model.layers.0.self_attn.q_proj"
    to_hf = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    from_hf = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    for kind, tensor in (("weight", rows[:, None].expand(16, 16)), ("bias", rows)):
        there = adapter.to_hf({f"{ours}.{kind}": tensor})[f"{theirs}.{kind}"]
        back = adapter.from_hf({f"{theirs}.{kind}": tensor})[f"{ours}.{kind}"]
        assert there.view(16, -1)[:, 0].tolist() == to_hf
        assert back.view(16, -1)[:, 0].tolist() == from_hf
