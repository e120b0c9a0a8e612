"""What deepseek_v3 has of its own: latents, YaRN, Hugging Face files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.models.tiny import filled, sized
from torchtitan.checkpoint.hf import load_from_hf
from torchtitan.models.deepseek_v3 import (
    DeepSeekV3Model,
    DeepSeekV3ModelArgs,
    DeepSeekV3StateDictAdapter,
)
from torchtitan.models.moe import MoEArgs


def tiny_args(**changes):
    sizes = {"inter_dim": 48, "moe_inter_dim": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    experts = MoEArgs(num_experts=4, top_k=2, score_before_experts=False)
    return sized(DeepSeekV3ModelArgs, moe_args=experts, **sizes | changes)


def built(args, seed=3):
    return filled(DeepSeekV3Model(args), seed)


def test_yarn_holds_for_texts_shorter_than_the_original_length():
    short, long = (DeepSeekV3Model(tiny_args(max_seq_len=n, original_seq_len=32)) for n in (16, 64))
    assert torch.equal(short.freqs_cis, long.freqs_cis[:16])
    scale = short.layers["0"].attention.softmax_scale
    # mscale 1, factor 40: 0.1 ln 40 + 1 = 1.36889
    assert scale == pytest.approx(16**-0.5 * 1.36889**2, rel=1e-5)
    assert long.layers["0"].attention.softmax_scale == scale


# ---- Hugging Face files ----


def hf_files(model):
    state = DeepSeekV3StateDictAdapter(model.model_args, None).to_hf(model.state_dict())
    return {name: tensor.contiguous() for name, tensor in state.items()}


def load(args, folder, **options):
    model = built(args, seed=4)
    model.layers["1"].moe.expert_bias.fill_(7.0)
    state = load_from_hf(
        model.state_dict(), DeepSeekV3StateDictAdapter(args, None), str(folder), **options
    )
    model.load_state_dict(state, strict=False)
    return model


def assert_same_weights(a, b, **tolerance):
    for (name, ours), theirs in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance or {"rtol": 0, "atol": 0}, msg=name)


def test_correction_bias_that_files_lack_stays(tmp_path):
    model = built(tiny_args())
    files = {name: t for name, t in hf_files(model).items() if "correction_bias" not in name}
    save_file(files, tmp_path / "model.safetensors")
    loaded = load(tiny_args(), tmp_path)
    assert_same_weights(loaded, model)
    assert torch.all(loaded.layers["1"].moe.expert_bias == 7.0)


def test_fp8_files_are_read_as_fp32(tmp_path):
    # 160: a block of 128 and a smaller one.
    args = tiny_args(dim=160, inter_dim=192)
    model = built(args)
    files = {}
    for name, tensor in hf_files(model).items():
        if tensor.dim() < 2 or "embed" in name or "lm_head" in name or "mlp.gate.w" in name:
            files[name] = tensor
            continue
        n_rows, n_columns = (-(-size // 128) for size in tensor.shape)
        scales = 0.5 + torch.rand(n_rows, n_columns)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scaled = tensor / spread[: tensor.shape[0], : tensor.shape[1]]
        files[name] = scaled.to(torch.float8_e4m3fn)
        files[f"{name}_scale_inv"] = scales
    save_file(files, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(files, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load(args, tmp_path, from_quantized=True)
    # 3 bits of mantissa: half a step is 2^-4; numbers below 2^-6 lose more.
    assert_same_weights(loaded, model, rtol=2**-4, atol=2**-9)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
