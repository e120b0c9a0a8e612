"""qwen3 against Hugging Face's Qwen3ForCausalLM and Qwen2ForCausalLM on the same weights, fp32."""

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter

transformers = pytest.importorskip("transformers")

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN = 96, 32, 2, 4, 2, 48
GENERATIONS = ["qwen2", "qwen3"]


def head_dim_of(generation):
    """Qwen 3 chooses it freely."""
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
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
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


def loaded(args, hf_state_dict):
    """Our model with these weights, every one of them accounted for."""
    model = Qwen3Model(args)
    adapter = Qwen3StateDictAdapter(args, None)
    model.load_state_dict(adapter.from_hf(hf_state_dict), strict=True)
    return model, adapter


def random_tokens(*shape):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_logits_and_export_equal_hugging_face(generation, tied, tmp_path):
    reference = hf_model(generation, tied)
    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in files) != tied
    model, adapter = loaded(our_args(generation, enable_weight_tying=tied), files)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5  # logits are of order 0.3

    exported = adapter.to_hf(model.state_dict())
    assert set(exported) == set(files)
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_packed_documents_have_the_log_probs_of_documents_alone(generation, attn_type):
    reference = hf_model(generation)
    args = our_args(generation, attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, reference.state_dict())
    # Two rows with boundaries of their own, so with positions of their own.
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
    assert difference.abs().max() <= 5e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(generation, tied):
    reference = hf_model(generation, tied)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    model, _ = loaded(our_args(generation, enable_weight_tying=tied), weights)
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    batch = random_tokens(2, 33)
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(3):
            out = one(batch[:, :-1])
            logits = out if isinstance(out, torch.Tensor) else out.logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)
