"""What gpt_oss has of its own: initial weights, masks of clients, experts, published weights."""

import copy
import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.models.tiny import filled, sized
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.gpt_oss import (
    GptOssGroupedExperts,
    GptOssModel,
    GptOssModelArgs,
    GptOssStateDictAdapter,
    feed_forward,
    gptoss_configs,
)
from torchtitan.models.moe.moe import run_grouped_mm

pytestmark = pytest.mark.long


def tiny_args(**changes):
    sizes = {"n_kv_heads": 2, "head_dim": 16, "moe_inter_dim": 32, "sliding_window_size": 4}
    experts = copy.copy(gptoss_configs["debugmodel"].moe_args)
    return sized(GptOssModelArgs, moe_args=experts, **sizes | changes)


def built(args, seed=0):
    return filled(GptOssModel(args), seed)


def test_every_parameter_is_initialised_with_its_spread():
    model = GptOssModel(tiny_args(dim=64, moe_inter_dim=64, n_heads=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights()
    for layer_id, block in enumerate(model.layers.values()):
        wanted = 0.02 / (2 * (layer_id + 1)) ** 0.5
        for name, parameter in block.named_parameters():
            if "norm" in name:
                assert torch.all(parameter == 1), name
            elif name == "moe.router.gate.bias":
                assert torch.all(parameter == 0)
            else:
                # 64 draws or more: within 4 standard errors of the spread.
                assert parameter.std().item() == pytest.approx(wanted, rel=0.36), name


def first_difference(args, changed):
    """Positions whose logits depend on the token at `changed`."""
    model, tokens, logits = built(args), torch.arange(24)[None] % 60 + 1, []
    for token in (1, 63):
        tokens[0, changed] = token
        logits.append(model(tokens, attention_masks=model.get_attention_masks(tokens, None)))
    # Other tokens of an expert change how its products are rounded, if the group grows.
    moved = (logits[0] - logits[1]).abs() > 1e-4 * logits[0].abs().max()
    return moved.any(-1)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(("attn_type", "last"), [("flex", 23), ("varlen", 8)])
def test_clients_mask_replaces_the_windows_under_flex_only(attn_type, last, monkeypatch):
    args = tiny_args(n_layers=1, attn_type=attn_type, attn_mask_type="position_block_causal")
    documents = DocumentMask.from_documents(torch.zeros(1, 24, dtype=torch.int32))
    kernels_form = documents.lower(attn_type).lowered
    # A mask with a window of its own replaces them under both.
    for mask, end in ((documents, last), (kernels_form, last), (documents.with_window(8), 12)):
        monkeypatch.setattr(GptOssModel, "get_attention_masks", lambda *_, mask=mask: mask)
        assert first_difference(args, 5) == list(range(5, end + 1))


def test_sdpa_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="set model.attn_type to 'flex' or 'varlen'"):
        GptOssModel(tiny_args(attn_type="sdpa"))


# ---- experts ----


def tiny_experts(use_grouped_mm):
    experts = GptOssGroupedExperts(16, 24, 4, swiglu_limit=1.0, use_grouped_mm=use_grouped_mm)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    return experts


def test_rows_that_belong_to_no_expert_leave_gradients_alone():
    experts = tiny_experts(True)
    weights = [experts.mlp1_weight, experts.mlp2_weight, experts.mlp1_bias, experts.mlp2_bias]
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    with_rest = torch.cat([x, torch.full((2, 16), torch.nan)])
    counts = torch.tensor([2, 0, 1, 3])
    run = partial(run_grouped_mm, partial(feed_forward, limit=1.0))
    gradients = [
        torch.autograd.grad(run(*weights, rows, counts)[:6].square().sum(), weights)
        for rows in (x, with_rest)
    ]
    # The rows' addresses in memory may change how a CPU's matrix product rounds.
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)


# ---- published weights ----

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def write_mxfp4(folder, hf_weights):
    """Write a file like the published files; return its experts' weights in our layout."""
    generator = torch.Generator().manual_seed(2)
    tensors, experts = {}, {}
    for name, tensor in hf_weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.contiguous()
            continue
        n_experts, n_in, n_out = tensor.shape
        shape = (n_experts, n_out, n_in // 32, 32)
        codes = torch.randint(0, 16, shape, generator=generator)
        scales = torch.randint(120, 130, shape[:3], generator=generator)
        low, high = codes[..., ::2], codes[..., 1::2]
        tensors[f"{name}_blocks"] = (low | (high << 4)).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        values = torch.tensor(FP4)[codes] * 2.0 ** (scales - 127)[..., None]
        experts[name] = values.flatten(-2)
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return experts


def test_published_mxfp4_files_are_read(tmp_path):
    from torchtitan.checkpoint.hf import load_from_hf

    args = tiny_args(dim=64, moe_inter_dim=96)  # several groups of 32 in a row
    saved, model = built(args), built(args, seed=1)
    adapter = GptOssStateDictAdapter(args, str(tmp_path))
    weights = adapter.to_hf(saved.state_dict())
    experts = write_mxfp4(tmp_path, weights)
    loaded = load_from_hf(model.state_dict(), adapter, str(tmp_path), from_quantized=True)
    model.load_state_dict(loaded, strict=False)
    for layer_id, layer in model.layers.items():
        name = f"model.layers.{layer_id}.mlp.experts"
        assert torch.equal(layer.moe.experts.mlp1_weight, experts[f"{name}.gate_up_proj"])
        assert torch.equal(layer.moe.experts.mlp2_weight, experts[f"{name}.down_proj"])
    for (name, got), want in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(got, want) != name.endswith(("mlp1_weight", "mlp2_weight")), name
