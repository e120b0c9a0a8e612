"""llama4 against Hugging Face's Llama4ForCausalLM on the same weights, fp32."""

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.models.llama4 import Llama4StateDictAdapter, Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

# Layers 1 and 3 have experts; layer 2 has no RoPE and sees past the chunks of 8 tokens.
VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 32, 4, 4, 2, 8
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


def loaded(args, hf_state_dict):
    """Our model with these weights, all accounted for but the bias that HF's router has not."""
    model = Transformer(args)
    adapter = Llama4StateDictAdapter(args, None)
    result = model.load_state_dict(adapter.from_hf(hf_state_dict), strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == ["layers.1.moe.expert_bias", "layers.3.moe.expert_bias"]
    return model, adapter


def random_tokens(*shape):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", [*VARIANTS, TWO_OF_FOUR])
def test_logits_and_export_equal_hugging_face(variant, tmp_path):
    reference = hf_model(**variant)
    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model, adapter = loaded(our_args(**variant), files)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours = model(tokens, attention_masks=model.get_attention_masks(tokens, None))
        theirs = reference(tokens).logits
    assert theirs.abs().max() > 0.3
    assert (ours - theirs).abs().max() <= 1e-5

    exported = adapter.to_hf(model.state_dict())
    assert set(exported) == set(files)
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_have_the_log_probs_of_documents_alone(variant, attn_type):
    reference = hf_model(**variant)
    args = our_args(attn_type=attn_type, attn_mask_type="position_block_causal", **variant)
    model, _ = loaded(args, reference.state_dict())
    # Two rows with boundaries of their own, none of them where chunks of rows would end.
    lengths = [[7, 1, 20, 12], [30, 10]]
    tokens = random_tokens(2, 40)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        masks = model.get_attention_masks(tokens, None, {"positions": positions})
        ours = model(tokens, attention_masks=masks, positions=positions)
        theirs = [
            torch.cat([reference(part).logits for part in row[None].split(sizes, dim=1)], dim=1)
            for row, sizes in zip(tokens, lengths, strict=True)
        ]
    difference = ours.log_softmax(-1) - torch.cat(theirs).log_softmax(-1)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(variant):
    reference = hf_model(**variant)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    model, _ = loaded(our_args(**variant), weights)
    batch = random_tokens(2, 33)
    masks = model.get_attention_masks(batch[:, :-1], None)
    forwards = {
        reference: lambda tokens: reference(tokens).logits,
        model: lambda tokens: model(tokens, attention_masks=masks),
    }
    losses = []
    for one, forward in forwards.items():
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(3):
            logits = forward(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)


def test_weights_of_the_multimodal_class_are_read_without_its_images():
    text = hf_model(**VARIANTS[0]).state_dict()
    files = {f"language_model.{name}": tensor for name, tensor in text.items()}
    files["vision_model.layernorm_pre.weight"] = torch.ones(3)
    files["multi_modal_projector.linear_1.weight"] = torch.ones(3)
    model, adapter = loaded(our_args(), files)
    spelled = adapter.spelled_like(files).to_hf(model.state_dict())
    assert spelled.keys() == {name for name in files if name.startswith("language_model.")}
    assert adapter.to_hf(model.state_dict()).keys() == text.keys()
